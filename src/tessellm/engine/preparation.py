"""Prepare an engine before its first request, so that none waits for what is made once: buffers, compiled rules,
captured passes. On a CPU, where nothing is compiled or captured, that is a short text.

What is compiled or captured afterwards is counted: it should be nothing. Knows token ids; servers prepare their texts.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from .engine import Engine
from .requests import Request
from .sampling import Sampling

TOKENS = 8  # of the text that shows which buffers there are

log = logging.getLogger("tessellm.engine")


@dataclass(frozen=True)
class Prepared:
    """An engine that is ready."""

    engine: Engine
    seconds: float  # that it took
    made: int  # compilations and captures until then

    @property
    def late(self) -> int:
        """Count compilations and captures since."""
        return made(self.engine) - self.made


def prepare(
    engine: Engine,
    also: Sequence[Request] = (),
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> Prepared:
    """Run a short text and the requests `also`, then prepare every pass that requests can meet; `tell` how many of how
    many are. Where memory runs out, the rest is prepared when it comes. The engine must be idle."""
    began = time.monotonic()
    engine.executor.few_shapes = True
    engine.executor.count_tokens()
    run(engine, [Request([0] * min(TOKENS, engine.context - 1), Sampling(min(2, engine.context - 1))), *also])
    passes = list(_passes(engine))
    with torch.inference_mode():
        for done, each in enumerate(passes):
            try:
                each()
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                log.warning("memory ran out when %d of %d passes were prepared", done, len(passes))
                break
            tell(done + 1, len(passes))
    engine.prefixes.forget()
    engine.executor.sealed = True
    return Prepared(engine, time.monotonic() - began, made(engine))


def run(engine: Engine, requests: Sequence[Request]) -> None:
    """Run requests to their ends, whatever these are."""
    engine.waiting.extend(map(engine.limits.check, requests))
    while engine.busy:
        engine.step()


def _passes(engine: Engine) -> Iterator[Callable[[], object]]:
    for rows in sorted({rows for rows, _ in engine.executor.prepared_sizes()} - {1}):
        yield partial(_read_together, engine, rows)
    yield from engine.executor.planned()
    if engine.speculator is not None:
        yield from engine.executor.planned_drafts(engine.speculator.lengths)


def _read_together(engine: Engine, count: int) -> None:
    """Read so many prompts in one pass, for which a rule may have to be compiled; of some kinds that pass is never
    captured. They differ from their first token on, or one would wait for the other."""
    vocabulary, length = engine.model.config.vocab_size, min(TOKENS, engine.context - 1)
    run(engine, [Request([number % vocabulary] * length, Sampling(1)) for number in range(count)])


def made(engine: Engine) -> int:
    """Count what was compiled in this process, again for another shape included, and captured by this engine."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    compiled = 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])
    return compiled + engine.executor.captures
