"""Speculation: drafts that all members verify in one pass, so that a pass brings several tokens instead of one.

    engine = Engine(model, speculation=Speculation("lookup"))          # or "member:base"

Exact at every batch size, greedy and sampled: see verification.py. Rows of a batch keep different numbers of tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...errors import EngineError, nearest
from ...model import ComposedForCausalLM
from ..requests import Request
from ..sampling import how
from ..state import SlotState
from ..steps import Steps, Written
from .drafts import Alone, Drafter, Lookup, room
from .pace import Chances, Pace
from .verification import Verification

PATIENCE = 16  # passes in a row for which drafts did not pay
CELLS_APART = 64  # that are looked at when all passes are prepared
REST = 16  # steps after them that think of none


@dataclass(frozen=True)
class Speculation:
    """Who drafts (`lookup`, or `member:NAME`), at most how many tokens, and whether as many as pay or always that."""

    draft: str = "lookup"
    longest: int = 8
    adaptive: bool = True

    def __post_init__(self) -> None:
        kind, _, name = self.draft.partition(":")
        if self.draft != "lookup" and not (kind == "member" and name):
            raise EngineError(f"expected draft='lookup' or 'member:NAME'; got {self.draft!r}")
        if not 1 <= self.longest <= 64:
            raise EngineError(f"expected drafts of 1 to 64 tokens; got longest={self.longest}")

    def check(self, model: ComposedForCausalLM) -> None:
        """EngineError where the member that is to draft is none of the composition's."""
        if self.member and self.member not in model.members:
            raise EngineError(f"no member {self.member!r} to draft; {nearest(self.member, model.members)}")

    @property
    def member(self) -> str:
        """The member that drafts; empty where the text itself does."""
        return self.draft.partition(":")[2]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Powers of two, and the longest: few, since each may be compiled or captured for itself."""
        return (*(2**n for n in range(self.longest.bit_length()) if 2**n < self.longest), self.longest)

    @property
    def lengths_on_gpu(self) -> tuple[int, ...]:
        """Such that a pass, which has one token more, fills the blocks of rows that kernels compute anyway. None of a
        single token: a pass over four takes hardly longer than one over two."""
        full = [2**n - 1 for n in range(2, 7) if 2**n - 1 <= self.longest]
        if full and self.adaptive:
            return tuple(full)
        return (*(length for length in full if length < self.longest), self.longest)


class Speculator:
    """Decodes with drafts, for an engine."""

    def __init__(self, wanted: Speculation, model: ComposedForCausalLM, state: SlotState, steps: Steps):
        self.wanted, self.steps = wanted, steps
        steps.few_shapes = True  # each is captured for every length
        self.verification = Verification(state, wanted.longest)
        wanted.check(model)
        self.drafter: Drafter = (
            Alone(model, wanted.member, self.verification) if wanted.member else Lookup(self.verification)
        )
        # on a CPU the thread's own time: what else the machine does is not taken for a cost
        clock = time.thread_time if state.device.type == "cpu" else time.perf_counter
        self.lengths = wanted.lengths if state.device.type == "cpu" else wanted.lengths_on_gpu
        self.chances, self.pace = Chances(), Pace(self.lengths, clock)
        self.passes = self.drafted = self.accepted = 0
        self._in_vain = self._rest = 0  # passes without drafts in a row; steps until they are thought of again

    def awake(self) -> bool:
        """Whether to think of drafts now. Where they have not paid for a while, steps go on without waiting for one
        another, and they are thought of again after some."""
        self._rest = max(0, self._rest - 1)
        return not self._rest

    def decode(self, running: Sequence[Request], rows: int) -> Written:
        """One pass: at least one token for each request, and as many more as its draft had right."""
        asked_how = how(r.sampling for r in running)
        cells = max(len(r.prompt) + r.asked for r in running)
        for length, seconds in self._ready(rows, cells, asked_how).items():
            self.pace.told(rows, length, seconds)
        started, prepared = self.pace.clock(), self.steps.prepared_seconds
        kinds = [self.drafter.kind(request) for request in running]
        length = self._length(running, rows, kinds)
        if length:
            self.drafter.write(self.steps, running, rows, length, cells + length, asked_how)
            self.steps.verify(self.verification, rows, length, cells + length, asked_how)
            came = self.steps.get(self.verification.came_SX[:rows])
            written = self.verification.read(came, _slots(running))
        else:
            written = self._plain(running, rows, cells, asked_how)
        preparing = self.steps.prepared_seconds - prepared  # compiling and capturing, once: no cost of the length
        self.pace.note(rows, length, self.pace.clock() - started - preparing)
        self.passes += 1
        self._in_vain = 0 if length else self._in_vain + 1
        if self._in_vain >= PATIENCE and self.steps.lag:
            self._rest = REST
        for request, kind, tokens in zip(running, kinds, written[0], strict=True):
            if kind is not None:
                self._learn(request, kind, length, tokens)
        return written

    def prepare(self, prompt: int, new: int, asked_how: str) -> None:
        """Have every pass ready that prompts of up to so many tokens, and as many new ones, can meet; after the first
        text, which shows what state the rule has."""
        with torch.inference_mode():
            for rows in range(1, len(self.verification.room_S) + 1):
                for cells in (*range(1, prompt + new, CELLS_APART), prompt + new):
                    self._ready(rows, cells, asked_how)

    def _ready(self, rows: int, cells: int, asked_how: str) -> dict[int, float]:
        member = self.drafter if isinstance(self.drafter, Alone) else None
        if member:
            member.share_cache()
        return self.steps.ready(self.verification, member, self.lengths, rows, cells, asked_how)

    def _length(self, running: Sequence[Request], rows: int, kinds: Sequence[int | None]) -> int:
        able = [(r, kind) for r, kind in zip(running, kinds, strict=True) if kind is not None]
        if self.wanted.adaptive:
            hopes = [(self.chances.of(r, kind), room(r)) for r, kind in able]
            return self.pace.choose(rows, hopes + [(0.0, 0)] * (len(running) - len(able)))
        most = min(max((room(r) for r, _ in able), default=0), self.lengths[-1])
        return next(n for n in (0, *self.lengths) if n >= most)

    def _plain(self, running: Sequence[Request], rows: int, cells: int, asked_how: str) -> Written:
        self.steps.decode(rows, cells, asked_how)
        return self.steps.fetch(_slots(running))()

    def _learn(self, request: Request, kind: int, length: int, tokens: Sequence[int]) -> None:
        drafted = min(length, room(request))
        if drafted > 0:
            right = len(tokens) - 1
            self.drafted, self.accepted = self.drafted + drafted, self.accepted + right
            self.chances.note(request, kind, right, drafted)
        elif (first := self.drafter.first(request)) is not None:  # it would have been right or wrong all the same
            self.chances.note(request, kind, int(first == tokens[0]), 1)
        elif not length:
            self.chances.fade(request, kind)


def _slots(running: Sequence[Request]) -> list[int]:
    return [request.slot for request in running if request.slot is not None]
