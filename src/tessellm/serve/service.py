"""Service: from a checked request to its answer. Knows texts and models; knows nothing of HTTP but its refusals."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from ..diagnose.shown import colour, line_style
from ..engine.engine import Engine
from ..engine.memory import plan_slots
from ..engine.requests import NEVER, Request
from ..engine.sampling import Sampling
from ..errors import FastPathError, GenerationError, PromptError
from ..model import ComposedForCausalLM
from ..model.temperature import COLDEST
from ..rules import RULES
from ..text.engines import unusual_settings
from ..text.options import seed_of
from ..text.prompts import tokenizer_of
from ..text.stops import stop_finder
from ..text.stream import TextStream
from ..text.writer import Ordered
from .answers import Answer, Model, ModelAbout, ModelMember, Models, Usage
from .choices import RunningChoice, TextPiece, pieces
from .metrics import Metrics
from .prompts import Prompts, as_list
from .readiness import make_ready
from .refusals import Refusal, bad
from .replies import ChatReply, CompletionReply, as_event
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

    @property
    def usage(self) -> Usage:
        prompts = {id(choice.job.request.prompt): len(choice.job.request.prompt) for choice in self.choices}
        read, written = sum(prompts.values()), sum(choice.count for choice in self.choices)
        return Usage(prompt_tokens=read, completion_tokens=written, total_tokens=read + written)


class Service:
    """One composition, its engine, and everyone who asks."""

    def __init__(self, model: ComposedForCausalLM, name: str, settings: Settings):
        self.model, self.settings, self.created = model, settings, int(time.time())
        self.tokenizer = tokenizer_of(model)
        if unused := unusual_settings(model):
            log.warning("the generation config sets %s, which this server does not know", ", ".join(unused))
        self.targets, self.metrics = Targets(model, name), Metrics()
        self.engine = _engine(model, settings)
        self.prepared = make_ready(self.engine, self.targets)
        self.scheduler = Scheduler(self.engine, settings.queue, self._ended)
        choices = min(settings.choices, self.scheduler.room)
        self.prompts = Prompts(self.tokenizer, self.engine.context, model.config.vocab_size, choices)

    def models(self) -> Models:
        return Models(data=[self.about(name) for name in self.targets.names])

    def about(self, name: str) -> Model:
        target, config = self.targets.find(name), self.model.config
        if name in self.targets.members:
            return Model(id=target.model, created=self.created, tessellm=ModelAbout(kind="member"))
        weights = (None, *config.weights)
        ids = zip(config.member_names, self.targets.members, weights, strict=True)
        members = [
            ModelMember(name=each, model=id_, weight=weight, colour=colour(number), line=line_style(number))
            for number, (each, id_, weight) in enumerate(ids)
        ]
        about = ModelAbout(
            kind="composition",
            rule=config.rule["name"],
            rules=self.targets.rules,
            summaries={rule: RULES[rule].summary for rule in self.targets.rules if rule in RULES},
            chat=bool(self.tokenizer.chat_template),
            members=members,
        )
        return Model(id=name, created=self.created, tessellm=about)

    async def complete(self, asked: CompletionRequest) -> Running:
        target = self._target(asked)
        reply = CompletionReply(
            self.tokenizer, asked.model, self.model.config.member_names, asked.top, asked.extension.trace
        )
        with self.scheduler.place(self.prompts.count(asked)):
            rows = await self.prompts.of_completion(asked)
            reply.echoed = self._texts(asked, rows) if asked.echo else ()
            return self._start(asked, target, reply, rows, asked.max_tokens, 16, "prompt")

    async def chat(self, asked: ChatRequest) -> Running:
        target = self._target(asked)
        reply = ChatReply(self.tokenizer, asked.model, self.model.config.member_names, asked.top, asked.extension.trace)
        wanted = asked.max_completion_tokens or asked.max_tokens
        with self.scheduler.place(self.prompts.count(asked)):
            rows = await self.prompts.of_chat(asked)
            return self._start(asked, target, reply, rows, wanted, self.engine.context, "messages")

    def _texts(self, asked: CompletionRequest, rows: Sequence[list[int]]) -> list[str]:
        """Return the prompt of each choice: as it came, or its ids as text."""
        pairs = zip(as_list(asked.prompt), rows, strict=True)
        texts = [prompt if isinstance(prompt, str) else str(self.tokenizer.decode(row)) for prompt, row in pairs]
        return [text for text in texts for _ in range(asked.n or 1)]

    def _target(self, asked: Generation) -> Target:
        return self.targets.find(asked.model, asked.extension.rule, asked.extension.weights)

    def _start(
        self,
        asked: Generation,
        target: Target,
        reply: Any,
        rows: Sequence[list[int]],
        wanted: int | None,
        default: int,
        param: str,
    ) -> Running:
        seed = secrets.randbits(38) if asked.seed is None else asked.seed
        observer = target.trace if reply.trace else top if reply.top else None
        requests: list[Ordered] = []
        for row in rows:  # one list for all choices of a prompt
            room = self.engine.context - len(row)
            self.prompts.check_room(len(row), wanted or 1, param)
            for _ in range(asked.n or 1):
                sampling = _sampling(asked, wanted or min(default, room), seed, len(requests))
                request = self._checked(Request(row, sampling, target.experts, observer, reply.trace))
                requests.append((request, stop_finder(self.tokenizer, asked.stops, row)))
        jobs = self.scheduler.submit(requests, self.settings.seconds)
        if self.settings.log_prompts:
            log.info("prompts for %s: %r", asked.model, [self.tokenizer.decode(row) for row in rows])
        choices = [
            RunningChoice(
                job,
                TextStream(self.tokenizer, asked.stops, job.request.prompt),
                NEVER if asked.ignore_eos else self.engine.ends,
                self.settings.seconds,
            )
            for job in jobs
        ]
        return Running(asked, reply, choices)

    def _checked(self, request: Request) -> Request:
        try:
            return self.engine.limits.check(request)
        except (PromptError, GenerationError) as error:
            raise bad(str(error)) from error

    async def whole(self, running: Running) -> Answer:
        """Return the answer, when all of it is there."""
        texts, tokens, reasons = ({n: [] for n in range(len(running.choices))} for _ in range(3))  # type: ignore[var-annotated]
        async with aclosing(pieces(self.scheduler, running.choices)) as coming:
            async for number, piece in coming:
                texts[number].append(piece.text)
                tokens[number] += piece.tokens
                reasons[number].append(piece.finish_reason)
        made = [
            (choice.text.text, TextPiece("".join(texts[n]), tokens[n], reasons[n][-1]))
            for n, choice in enumerate(running.choices)
        ]
        return running.reply.whole(made, running.usage)

    async def streamed(self, running: Running) -> AsyncGenerator[bytes, None]:
        """Stream the answer as server-sent events; a failure on the way is the last of them."""
        begun: set[int] = set()
        try:
            async with aclosing(pieces(self.scheduler, running.choices)) as coming:
                async for number, piece in coming:
                    text = running.choices[number].text.text
                    yield as_event(running.reply.piece(number, text, piece, number not in begun))
                    begun.add(number)
            if running.asked.wants_usage:
                yield as_event(running.reply.usage(running.usage))
        except Refusal as refusal:
            yield b"data: " + refusal.response.model_dump_json().encode() + b"\n\n"
        yield b"data: [DONE]\n\n"

    def _ended(self, request: Request) -> None:
        now = time.monotonic()
        self.metrics.request_ended(request, now)
        log.info(
            "%d tokens read, %d written, %s, %.3f s",
            len(request.prompt), len(request.tokens), request.finish_reason, now - request.submitted,
        )  # fmt: skip


def _engine(model: ComposedForCausalLM, settings: Settings) -> Engine:
    """The fast path; members as they are where that was asked for, or where the fast path does not know them."""
    plan = plan_slots(model, settings.slots, settings.context)
    log.info("%s", plan)
    if not settings.plain:
        try:
            return Engine(model, plan.slots, plan.context, speculation=settings.speculation)
        except FastPathError as error:
            log.warning("%s", error)
            log.warning("serving members as they are: slower, and one sequence after another")
    return Engine(model, plan.slots, plan.context, plain=True)


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
