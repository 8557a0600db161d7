"""Writer: continuations of many prompts, each with its own limits and stop texts, reported as they end.

By the fast engine; by the reference model where the engine cannot run the composition. A prompt that fails does not end
the others. Stop texts end a continuation while it is decoded.

How numbers are rounded depends on what is computed together, and a tie within rounding may fall either way. So prompts
are written in blocks that start alike whatever came before, and of a block that was cut short all is written again:
a run that was killed ends with the texts of one that was not.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from ..decoding.engine import Engine
from ..decoding.requests import Request as Running
from ..decoding.sampling import Sampling
from ..errors import EngineError, TessellmError
from ..model import ComposedForCausalLM
from ..text.continuations import by_reference, engine_for
from ..text.prompts import tokenizer_of
from ..text.requests import Request
from ..text.stops import stop_at_text
from ..text.writer import finished

BLOCK = 16  # batches that are written together


@dataclass(frozen=True)
class Ask:
    """A prompt, and how to continue it."""

    ids: tuple[int, ...]
    request: Request


@dataclass(frozen=True)
class Written:
    """What came of it."""

    text: str  # up to the stop text
    tokens: int  # that were decoded for it
    finish_reason: str  # stop: an end token or a stop text; length: it would have gone on; error
    error: str | None = None


class Writer:
    """Writes with one composition."""

    def __init__(
        self,
        model: ComposedForCausalLM,
        batch_size: int = 8,
        engine: str = "auto",
        note: Callable[[str], None] = lambda text: None,
    ):
        self.model, self.batch_size, self.note = model, batch_size, note
        self.tokenizer = tokenizer_of(model)
        self.use_engine = engine != "reference"

    def write(self, asks: Sequence[Ask], wanted: Container[int] | None = None) -> Iterator[tuple[int, Written]]:
        """Continue all of them, or those whose numbers are wanted; each with its number, as soon as it has ended."""
        wanted = range(len(asks)) if wanted is None else wanted
        good = [number for number, ask in enumerate(asks) if not self._problem(ask)]
        engine: Engine | None = None
        for number, ask in enumerate(asks):
            if number in wanted and (problem := self._problem(ask)):
                yield number, Written("", 0, "error", problem)
        for start in range(0, len(good), BLOCK * self.batch_size):
            block = good[start : start + BLOCK * self.batch_size]
            if not any(number in wanted for number in block):
                continue
            engine = engine or self._engine_for([asks[number] for number in good])
            if engine is not None:
                engine.prefixes.forget()
            for number, written in self._by_engine(engine, asks, block) if engine else self._by_reference(asks, block):
                if number in wanted:
                    yield number, written

    def _problem(self, ask: Ask) -> str | None:
        limit = self.model.config.max_position_embeddings
        if not ask.ids:
            return "the prompt is empty"
        if limit and len(ask.ids) + ask.request.max_new_tokens > limit:
            return f"{len(ask.ids)} + {ask.request.max_new_tokens} tokens are more than the context, {limit}"
        return None

    def _engine_for(self, asks: Sequence[Ask]) -> Engine | None:
        """An engine for all of them, whether or not they are wanted: a larger one adds in another order."""
        if not self.use_engine:
            return None
        longest = max(len(ask.ids) + ask.request.max_new_tokens for ask in asks)
        room = Request(max_new_tokens=longest - max(len(ask.ids) for ask in asks))
        try:
            return engine_for(self.model, [ask.ids for ask in asks], room, self.batch_size)
        except EngineError as error:
            self.use_engine = False
            self.note(str(error))
        return None

    def _by_engine(self, engine: Engine, asks: Sequence[Ask], good: Sequence[int]) -> Iterator[tuple[int, Written]]:
        running = {engine.submit(asks[number].ids, _sampling(asks[number].request)): number for number in good}
        try:
            while running:
                for arrived in engine.step():
                    ask = asks[running[arrived]] if arrived in running else None
                    if ask is not None and ask.request.stop and not arrived.done:
                        stop_at_text(engine, arrived, self.tokenizer, ask.request.stop)
                for request in [request for request in running if request.done]:
                    number = running.pop(request)
                    yield number, self._written(asks[number], request.tokens, request)
        finally:  # whoever asked may have gone away
            for request in running:
                engine.cancel(request)

    def _by_reference(self, asks: Sequence[Ask], good: Sequence[int]) -> Iterator[tuple[int, Written]]:
        def wish(number: int) -> str:
            return repr(asks[number].request)

        for _, group in groupby(sorted(good, key=wish), wish):
            numbers = list(group)
            for start in range(0, len(numbers), self.batch_size):
                yield from self._batch_by_reference(asks, numbers[start : start + self.batch_size])

    def _batch_by_reference(self, asks: Sequence[Ask], numbers: list[int]) -> Iterator[tuple[int, Written]]:
        request, rows = asks[numbers[0]].request, [asks[number].ids for number in numbers]
        try:
            written = list(by_reference(self.model, rows, request, len(rows), None))
        except TessellmError as error:
            yield from ((number, Written("", 0, "error", str(error))) for number in numbers)
            return
        for number, tokens in zip(numbers, written, strict=True):
            yield number, self._written(asks[number], tokens)

    def _written(self, ask: Ask, tokens: list[int], request: Running | None = None) -> Written:
        if request is not None and request.finish_reason == "error":
            return Written("", len(tokens), "error", request.error)
        done = finished(self.model, "", tokens, ask.request)
        return Written(done.text, done.tokens, done.finish_reason)


def _sampling(request: Request) -> Sampling:
    return Sampling(request.max_new_tokens, request.temperature, request.top_p, request.seed)
