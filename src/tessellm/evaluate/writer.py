"""BlockWriter: continuations of many prompts, each with its own options, reported as they end. A prompt that fails does
not end the others.

How numbers are rounded depends on what is computed together, and a tie within rounding may fall either way. So prompts
are written in blocks that start alike whatever came before, and of a block that was cut short all is written again:
a run that was killed ends with the texts of one that was not.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from ..engine.engine import Engine
from ..errors import PromptError, TessellmError
from ..model import ComposedForCausalLM
from ..text.engines import engine_for
from ..text.generate import finished
from ..text.options import TextOptions, seed_of
from ..text.prompts import check_row, tokenizer_of
from ..text.reference import by_reference
from ..text.writer import Writer, order

BLOCK = 16  # batches that are written together


@dataclass(frozen=True)
class Ask:
    """A prompt, and how to continue it."""

    ids: tuple[int, ...]
    options: TextOptions


@dataclass(frozen=True)
class Written:
    """What came of it."""

    text: str  # up to the stop text
    tokens: int  # that were decoded for it
    finish_reason: str  # stop: an end token or a stop text; length: it would have gone on; error
    error: str | None = None


class BlockWriter:
    """Writes with one composition: by the engine, or by the reference where the engine cannot run it."""

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
        problems = {number: problem for number, ask in enumerate(asks) if (problem := self._problem(ask))}
        yield from ((number, Written("", 0, "error", why)) for number, why in problems.items() if number in wanted)
        good = [number for number in range(len(asks)) if number not in problems]
        blocks = [
            good[start : start + BLOCK * self.batch_size] for start in range(0, len(good), BLOCK * self.batch_size)
        ]
        blocks = [block for block in blocks if any(number in wanted for number in block)]
        engine = self._engine_for([asks[number] for number in good]) if blocks else None
        for block in blocks:
            written = self._by_engine(engine, asks, block) if engine else self._by_reference(asks, block)
            yield from ((number, each) for number, each in written if number in wanted)

    def _problem(self, ask: Ask) -> str | None:
        try:
            check_row(self.model, ask.ids, ask.options.max_new_tokens)
        except PromptError as error:
            return str(error)
        return None

    def _engine_for(self, asks: Sequence[Ask]) -> Engine | None:
        """An engine for all of them, whether or not they are wanted: a larger one adds in another order."""
        if not self.use_engine:
            return None
        sizes = [(len(ask.ids), ask.options.max_new_tokens) for ask in asks]
        engine = engine_for(self.model, sizes, self.batch_size, note=self.note)
        self.use_engine = engine is not None
        return engine

    def _by_engine(self, engine: Engine, asks: Sequence[Ask], block: Sequence[int]) -> Iterator[tuple[int, Written]]:
        engine.prefixes.forget()
        ordered = [order(engine, self.tokenizer, asks[number].ids, asks[number].options, number) for number in block]
        for place, request in Writer(engine).write(ordered):
            if request.finish_reason == "error":
                yield block[place], Written("", len(request.tokens), "error", request.error)
            elif request.done:
                yield block[place], self._written(asks[block[place]], request.tokens)

    def _by_reference(self, asks: Sequence[Ask], block: Sequence[int]) -> Iterator[tuple[int, Written]]:
        def wish(number: int) -> str:
            return repr(asks[number].options)

        for _, group in groupby(sorted(block, key=wish), wish):
            numbers = list(group)
            for start in range(0, len(numbers), self.batch_size):
                yield from self._batch_by_reference(asks, numbers[start : start + self.batch_size])

    def _batch_by_reference(self, asks: Sequence[Ask], numbers: list[int]) -> Iterator[tuple[int, Written]]:
        options, rows = asks[numbers[0]].options, [asks[number].ids for number in numbers]
        options = replace(options, seed=seed_of(options.seed, numbers[0]))
        try:
            written = list(by_reference(self.model, rows, options, len(rows)))
        except TessellmError as error:
            yield from ((number, Written("", 0, "error", str(error))) for number in numbers)
            return
        for number, tokens in zip(numbers, written, strict=True):
            yield number, self._written(asks[number], tokens)

    def _written(self, ask: Ask, tokens: list[int]) -> Written:
        done = finished(self.model, "", tokens, ask.options)
        return Written(done.text, done.tokens, done.finish_reason)
