"""Speculator: decodes with drafts that all members verify in one pass, so that a pass brings several tokens.

Exact at every batch size, greedy and sampled: see verification.py. Rows of a batch keep different numbers of tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product

import torch

from ...model import ComposedForCausalLM
from ..buffers import StepResult
from ..passes import Workspace
from ..requests import Request
from ..sampling import TokenChoice
from ..steps import Steps
from ..voices import SpecialRows
from .drafts import Drafter, LookupDrafter
from .member_drafts import BelievedDrafter, MemberDrafter
from .pace import AcceptanceRates, ModelledPace, Pace, TextDrafts
from .verification import DraftBuffers, verify
from .who import Speculation, costs_of

BELIEVED_RATES = (0.75, 0.9, 0.97, 0.995)  # acceptance of drafts by how sure the rule is, before any were seen
PATIENCE = 16  # passes in a row for which drafts did not pay
REST = 16  # steps without drafts after them
CELLS_APART = 64  # between lengths of text for which passes are prepared
PREPARED = (TokenChoice.GREEDY, TokenChoice.SAMPLED, TokenChoice.NUCLEUS)  # requests with penalties have no drafts


class Speculator:
    """Decodes with drafts, for an engine."""

    def __init__(self, wanted: Speculation, model: ComposedForCausalLM, steps: Steps):
        work: Workspace = steps.work
        self.steps = steps
        on_cpu, self.by_belief = model.device.type == "cpu", wanted.by_belief
        self.lengths = wanted.lengths(on_cpu)
        slots, members = work.slots.broken_SM.shape
        self.drafts = DraftBuffers.empty(slots, members, self.lengths[-1], model.device)
        work.drafts[:] = [self.drafts.plan_SX]
        self.drafter = make_drafter(wanted, model, work, self.drafts)
        self._verify = partial(verify, work, self.drafts)
        # on a CPU the thread's own time: what else the machine does is not taken for a cost
        clock = time.thread_time if on_cpu else time.perf_counter
        self.pace = Pace(self.lengths, clock)
        if self.by_belief:
            self.pace = ModelledPace(self.lengths, clock, costs=costs_of(model))
        self.rates = AcceptanceRates(BELIEVED_RATES if self.by_belief else ())
        self._texts: dict[int, TextDrafts] = {}  # by number of the requests of the last pass
        self.passes = self.drafted = self.accepted = 0
        self._in_vain = self._rest = 0  # passes without drafts in a row; steps until drafts are tried again

    def awake(self, requests: Sequence[Request]) -> bool:
        """Whether to try drafts now: for requests in slots that may have some. Where they have not paid for a while,
        steps go on without waiting for one another, and drafts are tried again after some. Members do not rest while a
        prompt is read, which goes on between passes."""
        self._rest = max(0, self._rest - 1)
        if self._rest or any(request.asked and (request.voice or request.penalised) for request in requests):
            return False
        return not self.by_belief or all(request.asked for request in requests)

    def decode(
        self,
        running: Sequence[Request],
        slots: Sequence[int],
        special: SpecialRows | None = None,
        seconds: float = math.inf,
    ) -> StepResult:
        """Run one pass: at least one token per request, and as many more as its draft had right. `special`: rows that
        are observed; `seconds` that the pass may take, where its cost is modelled."""
        choice, cells = max(r.sampling.choice for r in running), max(r.cells for r in running)
        rows = self.steps.rows(slots[-1] + 1)
        for length, seconds in self._ready(rows, cells, choice).items():
            self.pace.set_device_time(rows, length, seconds)
        started, prepared = self.pace.clock(), self.steps.prepared_seconds
        in_slot = dict(zip(slots, running, strict=True))
        kinds = self.drafter.look(self.steps, in_slot)
        if isinstance(self.pace, ModelledPace) and isinstance(self.drafter, BelievedDrafter):
            self.pace.writers = len(set(self.drafter.writer.values()))
        self._texts = {request.number: self._texts.get(request.number) or TextDrafts() for request in running}
        length = self.pace.choose(rows, self._prospects(running, kinds, rows, seconds))
        result = self._run(in_slot, length, cells, choice, special)
        preparing = self.steps.prepared_seconds - prepared  # compiling and capturing, once: no cost of the length
        self.pace.note(rows, length, self.pace.clock() - started - preparing)
        self.passes += 1
        self._in_vain = 0 if length else self._in_vain + 1
        if self._in_vain >= PATIENCE and self.steps.lag:
            self._rest = REST
        in_vain = self.drafter.in_vain()
        cost = self.pace.in_steps(rows, length, in_vain) if isinstance(self.pace, ModelledPace) else 0.0
        texts = self._texts.values()
        for request, text, kind, tokens in zip(running, texts, kinds, result.tokens, strict=True):
            if kind is not None and tokens:
                self._learn(request, text, kind, length, tokens)
                text.lost = text.lost + cost - len(tokens)
        return result

    def _run(
        self,
        in_slot: Mapping[int, Request],
        length: int,
        cells: int,
        choice: TokenChoice,
        special: SpecialRows | None,
    ) -> StepResult:
        slots, rows = list(in_slot), max(in_slot) + 1
        if not length:
            self.drafter.forget()
            self.steps.decode(rows, cells, choice, special)
            return self.steps.fetch(slots)()
        self.drafter.write(self.steps, in_slot, length, cells + length, choice)
        if special is None:
            self.steps.run("verify", self._verify, rows, length, cells + length, choice)
        else:  # as it is: which rows are observed differs from pass to pass
            self._verify(rows, length, self.steps.cells(cells + length), choice, special)
        came = self.steps.get(self.drafts.came_SX[:rows])
        if special is None and self._may_begin_next(in_slot, length, cells + length):
            self.drafter.begin_next(self.steps, in_slot, length, cells + length, choice)
        result, believed = self.drafts.read(came(), slots, length + 1)
        self.drafter.hear(in_slot, result.tokens, believed)
        for (slot, request), tokens, broken in zip(in_slot.items(), result.tokens, result.broken, strict=True):
            if any(broken):
                self._drop_drafts(request, slot, len(tokens))
        return result

    def _may_begin_next(self, in_slot: Mapping[int, Request], length: int, cells: int) -> bool:
        """Whether members go on before the host has heard what came of drafts, so that the device does not wait for it:
        where passes can be on their way, the same pass writes a cell more, and no text loses more than it may if that
        was in vain."""
        if not self.steps.lag or not isinstance(self.pace, ModelledPace):
            return False
        if self.steps.cells(cells + 2) != self.steps.cells(cells):
            return False
        lost = self.pace.in_steps(self.steps.rows(max(in_slot) + 1), length, self.pace.writers) - 1
        return all(self._texts[request.number].can_lose(lost, request.asked) for request in in_slot.values())

    def _drop_drafts(self, request: Request, slot: int, kept: int) -> None:
        """Clear what a draft that a member cannot read left in the caches; where it spoilt its whole row, the request
        goes on without drafts."""
        self.drafter.forget()
        for group in self.steps.work.groups:
            group.cache.clear(slot, request.cells - 1 + kept)
        if not kept:
            request.stop_drafts()

    def prepare(self, prompt: int, new: int, choice: TokenChoice) -> None:
        """Prepare every pass that prompts of up to so many tokens, and as many new ones, can meet; after the first
        text, which shows what state the rule has."""
        with torch.inference_mode():
            for rows in sorted({self.steps.rows(needed) for needed in range(1, len(self.drafts.room_S) + 1)}):
                for cells in (*range(1, prompt + new, CELLS_APART), prompt + new):
                    self._ready(rows, cells, choice)

    def planned(self) -> Iterator[Callable[[], object]]:
        """Plan what requests can meet, as steps do: each call prepares passes of one size, with drafts of all lengths
        that end in the last of its cells."""
        for choice, (rows, cells) in product(PREPARED, self.steps.prepared_sizes()):
            yield partial(self._ready, rows, max(1, cells - self.lengths[-1]), choice)

    def _ready(self, rows: int, cells: int, choice: TokenChoice) -> dict[int, float]:
        """Prepare every way to draft, and verification; the device's seconds per length, unless costs are modelled."""
        lengths, timed = self.lengths, True
        if isinstance(self.pace, ModelledPace):
            lengths, timed = tuple(length for length in lengths if self.pace.costs.takes(rows, length)), False
        ways = self.drafter.passes()
        return self.steps.ready(ways, self._verify, self._clear_drafts, lengths, rows, cells, choice, timed)

    def _clear_drafts(self) -> None:
        self.drafts.clear()
        self.drafter.forget()

    def _prospects(
        self, running: Sequence[Request], kinds: Sequence[int | None], rows: int, seconds: float
    ) -> list[tuple[float, int]]:
        """Return for each request the acceptance rate to expect, and how many tokens to hope for; 0 without a draft. A
        member that was not yet seen to be right about a text is hoped to be for a short draft, and none is longer than
        the text can lose, or takes longer than it may, where lengths have a known cost in steps."""
        prices, most = None, self.lengths[-1]
        if isinstance(self.pace, ModelledPace):
            prices, most = self.pace.prices(rows), self.pace.longest_within(rows, seconds)
        prospects = []
        for request, text, kind in zip(running, self._texts.values(), kinds, strict=True):
            rate, room = (0.0, 0) if kind is None else (self.rates.rate(text, kind), min(request.room, most))
            if self.by_belief and not text.seen_right:
                room = min(room, self.lengths[0])
            if prices is not None:
                room = min(room, text.longest(prices, request.asked))
            prospects.append((rate, room))
        return prospects

    def _learn(self, request: Request, text: TextDrafts, kind: int, length: int, tokens: Sequence[int]) -> None:
        drafted = min(length, request.room)
        if drafted > 0:
            accepted = len(tokens) - 1
            self.drafted, self.accepted = self.drafted + drafted, self.accepted + accepted
            self.rates.note(text, kind, accepted, drafted)
        elif (first := self.drafter.first(request)) is not None:  # it would have been right or wrong all the same
            self.rates.note(text, kind, int(first == tokens[0]), 1)
        elif not length:
            self.rates.fade(text, kind)


def make_drafter(wanted: Speculation, model: ComposedForCausalLM, work: Workspace, drafts: DraftBuffers) -> Drafter:
    if wanted.by_belief:
        return BelievedDrafter(model, work, drafts)
    if wanted.member:
        return MemberDrafter(model, list(model.members).index(wanted.member), work, drafts)
    return LookupDrafter(drafts)
