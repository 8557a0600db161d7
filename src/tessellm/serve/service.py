"""Service: from a checked request to its answer. Knows texts and models; knows nothing of HTTP but its refusals."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from anyio import to_thread

from ..engine.engine import Engine
from ..engine.requests import NEVER, Request
from ..engine.sampling import Sampling
from ..errors import GenerationError, PromptError
from ..model import ComposedForCausalLM
from ..model.temperature import COLDEST
from ..text.answering import answered_by, routing_of
from ..text.engines import unusual_settings
from ..text.options import seed_of
from ..text.stops import stop_finder
from ..text.stream import TextStream
from ..text.structured import Structure
from ..text.writer import Ordered
from .answers import Answer, Model, Models, Usage
from .cards import model_card
from .choices import RunningChoice, TextPiece, pieces
from .metrics import Metrics
from .prompts import as_list
from .refusals import Refusal, bad
from .replies import ChatReply, CompletionReply, WrittenPiece, as_event
from .runner import RunningComposition
from .scheduler import Scheduler
from .schema import ChatRequest, CompletionRequest, Generation
from .settings import Settings
from .targets import Target, Targets, top

NARROWEST = 1e-9  # a top_p below this leaves the likeliest token

log = logging.getLogger("tessellm.serve")


@dataclass
class Running:
    """A request that was let in."""

    asked: Generation
    reply: CompletionReply | ChatReply
    choices: list[RunningChoice]
    scheduler: Scheduler
    names: Sequence[str]  # of the members
    begun: set[int] = field(default_factory=set)  # choices of which a piece was sent

    @property
    def usage(self) -> Usage:
        prompts = {id(choice.job.request.prompt): len(choice.job.request.prompt) for choice in self.choices}
        read, written = sum(prompts.values()), sum(choice.count for choice in self.choices)
        return Usage(prompt_tokens=read, completion_tokens=written, total_tokens=read + written)

    @property
    def answered_by(self) -> str:
        """Name who answers, as far as that is known; several names where choices differ."""
        found = [answered_by(self.names, choice.job.request) for choice in self.choices]
        return ", ".join(dict.fromkeys(name for name in found if name is not None))

    def written(self, number: int, piece: TextPiece) -> WrittenPiece:
        """Return a piece with what its choice has so far; its first piece says who answers."""
        choice, first = self.choices[number], number not in self.begun
        self.begun.add(number)
        return WrittenPiece(
            choice.text.text, piece, first, routing_of(self.names, choice.job.request) if first else None
        )


class Service:
    """A composition under its name, and everyone who asks."""

    def __init__(self, model: ComposedForCausalLM, name: str, settings: Settings):
        self.name, self.settings, self.created = name, settings, int(time.time())
        if unused := unusual_settings(model):
            log.warning("the generation config sets %s, which this server does not know", ", ".join(unused))
        self.metrics = Metrics()
        self.runner = RunningComposition(model, name, settings, self._ended)
        self.end = math.inf  # nobody is served any longer than this
        self._old: RunningComposition | None = None  # the one before, while it finishes what it let in
        self._loop: asyncio.AbstractEventLoop | None = None
        self._finishing: asyncio.Task[None] | None = None

    @property
    def model(self) -> ComposedForCausalLM:
        return self.runner.model

    @property
    def targets(self) -> Targets:
        return self.runner.targets

    @property
    def engine(self) -> Engine:
        return self.runner.engine

    @property
    def scheduler(self) -> Scheduler:
        return self.runner.scheduler

    @property
    def schedulers(self) -> list[Scheduler]:
        """List the scheduler, and that of a runner that finishes."""
        return [runner.scheduler for runner in (self.runner, self._old) if runner is not None]

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.scheduler.start(loop)

    def end_at(self, moment: float) -> None:
        """Set until when there is time for what was let in."""
        self.end = moment
        for scheduler in self.schedulers:
            scheduler.end = moment

    def stop(self) -> None:
        """Let the engines' threads end. What is still open is dropped: drain first."""
        for scheduler in self.schedulers:
            scheduler.stop()

    def runner_of(self, model: ComposedForCausalLM) -> RunningComposition:
        """Make a runner of a changed composition, as large as the present one."""
        engine = self.engine
        settings = replace(self.settings, slots=len(engine.in_slot), context=engine.context)
        return RunningComposition(model, self.name, settings, self._ended)

    def go_on_with(self, runner: RunningComposition) -> None:
        """Let another runner answer from now on; the present one finishes what it let in."""
        assert self._loop is not None
        runner.scheduler.end = self.end
        runner.scheduler.start(self._loop)
        self._old, self.runner = self.runner, runner
        self._finishing = asyncio.create_task(self._finish())

    async def finished(self) -> None:
        """Wait until no runner but the present one has anything to do."""
        if self._finishing is not None:
            await asyncio.shield(self._finishing)

    async def _finish(self) -> None:
        assert self._old is not None
        await self._old.finish()
        self._old = None
        await to_thread.run_sync(_collect)

    def models(self) -> Models:
        return Models(data=[self.about(name) for name in self.targets.names])

    def about(self, name: str) -> Model:
        self.targets.find(name)  # refuses what there is not
        return model_card(name, self.targets, self.created, self.engine.context)

    async def complete(self, asked: CompletionRequest) -> Running:
        runner, target = self.runner, self._target(asked)
        reply = CompletionReply(self.tokenizer, asked.model, runner.names, asked.top, asked.extension.trace)
        with runner.scheduler.place(runner.prompts.count(asked)):
            rows = await runner.prompts.of_completion(asked)
            reply.echoed = self._texts(asked, rows) if asked.echo else ()
            form = await runner.prompts.form_of(asked)
            room = runner.room(rows, asked.max_tokens, 16, "prompt")
            return self._start(runner, asked, target, reply, list(zip(rows, room, strict=True)), form)

    async def chat(self, asked: ChatRequest) -> Running:
        runner, target = self.runner, self._target(asked)
        reply = ChatReply(self.tokenizer, asked.model, runner.names, asked.top, asked.extension.trace)
        wanted = asked.max_completion_tokens or asked.max_tokens
        with runner.scheduler.place(runner.prompts.count(asked)):
            rows = await runner.prompts.of_chat(asked)
            form = await runner.prompts.form_of(asked)
            room = runner.room(rows, wanted, runner.engine.context, "messages")
            return self._start(runner, asked, target, reply, list(zip(rows, room, strict=True)), form)

    @property
    def tokenizer(self) -> Any:
        return self.runner.prompts.tokenizer

    def _texts(self, asked: CompletionRequest, rows: Sequence[list[int]]) -> list[str]:
        """Return the prompt of each choice: as it came, or its ids as text."""
        pairs = zip(as_list(asked.prompt), rows, strict=True)
        texts = [prompt if isinstance(prompt, str) else str(self.tokenizer.decode(row)) for prompt, row in pairs]
        return [text for text in texts for _ in range(asked.n or 1)]

    def _target(self, asked: Generation) -> Target:
        extension = asked.extension
        return self.targets.find(asked.model, extension.rule, extension.weights, extension.experts)

    def _start(
        self,
        runner: RunningComposition,
        asked: Generation,
        target: Target,
        reply: Any,
        prompts: Sequence[tuple[list[int], int]],
        form: Structure | None,
    ) -> Running:
        """Let a request in: prompts, and how many tokens may follow each."""
        seed = secrets.randbits(38) if asked.seed is None else asked.seed
        observer = target.trace if reply.trace else top if reply.top else None
        requests: list[Ordered] = []
        for row, new in prompts:  # one list for all choices of a prompt
            for _ in range(asked.n or 1):
                sampling = _sampling(asked, new, seed, len(requests))
                own = None if form is None else form.another()
                request = Request(row, sampling, target.experts, observer, reply.trace, own)
                request = _checked(runner.engine, request)
                requests.append((request, stop_finder(self.tokenizer, asked.stops, row)))
        jobs = runner.scheduler.submit(requests, self.settings.seconds)
        if self.settings.log_prompts:
            log.info("prompts for %s: %r", asked.model, [self.tokenizer.decode(row) for row, _ in prompts])
        choices = [
            RunningChoice(
                job,
                TextStream(self.tokenizer, asked.stops, job.request.prompt),
                NEVER if asked.ignore_eos else runner.engine.ends,
                self.settings.seconds,
            )
            for job in jobs
        ]
        return Running(asked, reply, choices, runner.scheduler, runner.names)

    async def whole(self, running: Running) -> Answer:
        """Return the answer, when all of it is there."""
        texts, tokens, reasons = ({n: [] for n in range(len(running.choices))} for _ in range(3))  # type: ignore[var-annotated]
        async with aclosing(pieces(running.scheduler, running.choices)) as coming:
            async for number, piece in coming:
                texts[number].append(piece.text)
                tokens[number] += piece.tokens
                reasons[number].append(piece.finish_reason)
        made = [
            running.written(n, TextPiece("".join(texts[n]), tokens[n], reasons[n][-1]))
            for n in range(len(running.choices))
        ]
        return running.reply.whole(made, running.usage)

    async def streamed(self, running: Running) -> AsyncGenerator[bytes, None]:
        """Stream the answer as server-sent events; a failure on the way is the last of them."""
        try:
            async with aclosing(pieces(running.scheduler, running.choices)) as coming:
                async for number, piece in coming:
                    yield as_event(running.reply.piece(number, running.written(number, piece)))
            if running.asked.wants_usage:
                yield as_event(running.reply.usage(running.usage))
        except Refusal as refusal:
            yield b"data: " + refusal.response.model_dump_json().encode() + b"\n\n"
        yield b"data: [DONE]\n\n"

    def _ended(self, names: Sequence[str], request: Request) -> None:
        now = time.monotonic()
        selected = answered_by(names, request)
        self.metrics.request_ended(request, selected, now)
        log.info(
            "%d tokens read, %d written by %s, %s, %.3f s",
            len(request.prompt), len(request.tokens), selected, request.finish_reason, now - request.submitted,
        )  # fmt: skip


def _collect() -> None:
    """Free a runner that is done, which was frozen when it was made ready."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def _checked(engine: Engine, request: Request) -> Request:
    try:
        return engine.limits.check(request)
    except (PromptError, GenerationError) as error:
        raise bad(str(error)) from error


def _sampling(asked: Generation, new: int, seed: int, number: int) -> Sampling:
    """Make the sampling settings of one choice; choices of one request differ in their seeds."""
    temperature = 1.0 if asked.temperature is None else asked.temperature
    top_p = 1.0 if asked.top_p is None else asked.top_p
    return Sampling(
        new,
        temperature if temperature >= COLDEST else 0.0,
        max(top_p, NARROWEST),
        seed_of(seed, number),
        asked.ignore_eos,
        top_k=asked.top_k or 0,
        frequency_penalty=asked.frequency_penalty or 0.0,
        presence_penalty=asked.presence_penalty or 0.0,
    )
