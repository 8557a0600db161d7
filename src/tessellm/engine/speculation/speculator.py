"""Speculator: decodes with drafts that all active members verify in one forward, so that it brings several tokens.

The token at a position is chosen from the composed distribution with the noise of its own seed and position, as a step
without drafts would choose it, and a draft token is accepted as long as it is that token. So drafts change how fast a
text comes, never which text, greedy and sampled alike. Rows of a batch keep different numbers of tokens.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence

from ..executor import Executor, StepResult
from ..requests import Request
from . import LENGTHS, LENGTHS_ON_GPU
from .draft_length import AcceptanceCount, AcceptanceRates, Counts, Pace
from .lookup import LookupDrafter

PATIENCE = 16  # forwards in a row for which drafts did not pay
REST = 16  # steps without drafts after them


class Speculator:
    """Decodes with drafts, for an engine."""

    def __init__(self, executor: Executor, on_cpu: bool):
        self.executor = executor
        self.lengths = LENGTHS if on_cpu else LENGTHS_ON_GPU
        self.drafter, self.rates = LookupDrafter(), AcceptanceRates()
        # on a CPU the thread's own time: what else the machine does is not taken for a cost
        self.pace = Pace(self.lengths, time.thread_time if on_cpu else time.perf_counter)
        self._texts: dict[int, Counts] = {}  # by number of the requests of the last forward
        self.passes = self.drafted = self.accepted = 0
        self._in_vain = self._rest = 0  # forwards without drafts in a row; steps until drafts are tried again

    def is_on(self, running: Sequence[Request]) -> bool:
        """Whether to try drafts now. Where they have not paid for a while, steps go on without waiting for one another,
        and drafts are tried again after some."""
        self._rest = max(0, self._rest - 1)
        return not self._rest and not any(request.penalised for request in running)

    def decode(self, running: Sequence[Request], slots: Sequence[int]) -> StepResult:
        """Run one forward: at least one token per request, and as many more as its draft had right."""
        rows = self.executor.rows(running, slots)
        for length, seconds in self.executor.ready_drafts(self.lengths, running, slots).items():
            self.pace.set_device_time(rows, length, seconds)
        began, prepared = self.pace.clock(), self.executor.prepared_seconds
        kinds = [self.drafter.kind(request) for request in running]
        self._texts = {r.number: self._texts.get(r.number, defaultdict(AcceptanceCount)) for r in running}
        length = self.pace.choose(rows, self._prospects(running, kinds))
        if length:
            drafts = [self.drafter.draft(request, length) for request in running]
            result = self.executor.verify(running, slots, drafts, length)
        else:
            result = self.executor.decode(running, slots).fetch()
        preparing = self.executor.prepared_seconds - prepared  # compiling and capturing, once: no cost of the length
        self.pace.note(rows, length, self.pace.clock() - began - preparing)
        self.passes += 1
        self._in_vain = 0 if length else self._in_vain + 1
        if self._in_vain >= PATIENCE and self.executor.in_flight:
            self._rest = REST
        for request, kind, tokens in zip(running, kinds, result.tokens, strict=True):
            if not tokens:
                request.drafts = False  # its draft spoilt the whole row
            elif kind is not None:
                self._learn(request, kind, length, tokens)
        return result

    def _prospects(self, running: Sequence[Request], kinds: Sequence[int | None]) -> list[tuple[float, int]]:
        """Return for each request the acceptance rate to expect, and how many tokens to hope for; 0 without a draft."""
        return [
            (0.0, 0) if kind is None else (self.rates.rate(self._texts[request.number], kind), request.room)
            for request, kind in zip(running, kinds, strict=True)
        ]

    def _learn(self, request: Request, kind: int, length: int, tokens: Sequence[int]) -> None:
        text, drafted = self._texts[request.number], min(length, request.room)
        if drafted > 0:
            accepted = len(tokens) - 1
            self.drafted, self.accepted = self.drafted + drafted, self.accepted + accepted
            self.rates.note(text, kind, accepted, drafted)
        elif (first := self.drafter.first(request)) is not None:  # it would have been right or wrong all the same
            self.rates.note(text, kind, int(first == tokens[0]), 1)
        elif not length:
            self.rates.fade(text, kind)
