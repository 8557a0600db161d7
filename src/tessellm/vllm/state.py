"""What a rule remembers per request: carried from token to token, rebuilt from memory.py where it is not there.

vLLM's models see no requests, but they see where each position lies in the cache. A state is filed under the slot of
the last position that it has read. The request whose next position follows that slot may use it: its tokens up to there
are the same, since they are in the same blocks. A slot that is written again forgets what was filed under it. In every
other case (a prompt just read, in one chunk or several; a prefix found in the cache; a request that was preempted) the
rule is run again from the position that it reads a text from: the last W, or those since the last turn of a chat.

Shapes: B requests of the batch, N rows, T positions, M members, V vocabulary, H hidden, S slots, P states held.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..model.rows import slices
from ..rules import ComposedRule
from .memory import Memory, Step

ABSENT = -1
Logprobs = Callable[[Tensor], Tensor | None]  # hidden_NH -> logp_MNV, None on ranks that gather no logits


@dataclass(frozen=True)
class Seat:
    """Where a request finds its state, if it does, and where it leaves it."""

    source: int
    target: int


class States:
    """The states of up to `size` requests."""

    def __init__(self, rule: ComposedRule, memory: Memory, size: int, row_elements: int, logprobs: Logprobs):
        self.rule, self.memory, self.size, self.logprobs = rule, memory, size, logprobs
        self.row_elements = row_elements  # numbers in one position's log-probabilities, all members together
        self.held: Any = None  # the rule's state, P rows
        self.seat_S = torch.tensor([])  # which state is filed under each slot
        self.slot_P = [ABSENT] * size  # and the slot of each state
        self.used_P = [0] * size  # when each was last used
        self.clock = 0

    def fresh(self, logp_MNV: Tensor) -> Tensor:
        """Rows without a past: trial runs, which also make room for the states before memory is measured."""
        token_N1 = torch.zeros(logp_MNV.shape[1], 1, dtype=torch.long, device=logp_MNV.device)
        logp_N1V, state = self.rule(logp_MNV[:, :, None], token_N1, torch.ones_like(token_N1, dtype=torch.bool), None)
        self._make_room(state)
        return logp_N1V[:, 0]

    def last_rows(self, step: Step, hidden_BH: Tensor) -> Tensor | None:
        """The composed log-probabilities after each request's last token: [B, V]."""
        batch, device = len(hidden_BH), hidden_BH.device
        row_B = torch.arange(batch, device=device)
        last_B = step.length_B[:batch].long() - 1
        pair_B2 = self.memory.slots(step, row_B, torch.stack([(last_B - 1).clamp_min(0), last_B], 1))
        alone_B = step.start_B[1 : batch + 1] - step.start_B[:batch] == 1
        seats = self._seats(step, pair_B2, alone_B & (last_B > 0))
        carried = [row for row, seat in enumerate(seats) if seat.source != ABSENT]
        rebuilt = [row for row, seat in enumerate(seats) if seat.source == ABSENT]
        logp_BV: dict[int, Tensor] = {}
        if carried:
            logp_MNV = self.logprobs(hidden_BH[carried])
            if logp_MNV is not None:
                token_N1 = self.memory.token_S[pair_B2[carried, 1:]]
                rows = self._advance(logp_MNV, token_N1, [seats[row] for row in carried])
                logp_BV.update(zip(carried, rows, strict=True))
        ends = last_B[rebuilt].tolist() if rebuilt else []
        for row, end in zip(rebuilt, ends, strict=True):
            found = self.replay(step, row, end, end)
            if found is not None:
                logp_BV[row] = found[0][0]
                self._keep(found[1], [seats[row].target])
        return torch.stack([logp_BV[row] for row in range(batch)]) if logp_BV else None

    def rows(self, step: Step, first: int, hidden_NH: Tensor) -> Tensor | None:
        """The composed log-probabilities after the batch's tokens from `first` on: [N, V]."""
        starts, lengths = step.start_B.tolist(), step.length_B.tolist()
        parts, stop = [], first + len(hidden_NH)
        for row, (start, end) in enumerate(pairwise(starts)):
            left, right = max(first, start), min(stop, end)
            if left < right:
                offset = lengths[row] - end  # from a place in the batch to a position of the request
                parts.append(self.replay(step, row, left + offset, right - 1 + offset))
        whole = [part[0] for part in parts if part is not None]
        return torch.cat(whole) if whole else None

    def replay(self, step: Step, row: int, first: int, last: int) -> tuple[Tensor, Any] | None:
        """Run the rule anew over a request's positions: its rows from `first` to `last`, [T, V], and the state."""
        device = self.memory.token_S.device
        begin = self._begin(step, row, first)
        position_1T = torch.arange(begin, last + 1, device=device)[None]
        slot_1T = self.memory.slots(step, torch.tensor([row], device=device), position_1T)
        hidden_1TH, token_1T = self.memory.recall(slot_1T)
        state, wanted = None, []
        for start, stop in slices(position_1T.shape[1], self.row_elements):
            logp_MTV = self.logprobs(hidden_1TH[0, start:stop])
            if logp_MTV is None:
                continue
            token_NT = token_1T[:, start:stop]
            logp_1TV, state = self.rule(logp_MTV[:, None], token_NT, torch.ones_like(token_NT, dtype=torch.bool), state)
            wanted.append(logp_1TV[0, max(0, first - begin - start) :])
        return (torch.cat(wanted), state) if wanted else None

    def _begin(self, step: Step, row: int, first: int) -> int:
        """Find the position of a request from which the rule is run, so that its rows from `first` on are right."""
        device = self.memory.token_S.device
        position_1T = torch.arange(first + 1, device=device)[None]
        slot_1T = self.memory.slots(step, torch.tensor([row], device=device), position_1T)
        return self.rule.reads_from(self.memory.token_S[slot_1T][0].tolist(), first)

    def _seats(self, step: Step, pair_B2: Tensor, may_carry_B: Tensor) -> list[Seat]:
        """Who has a state, and where everybody's will be filed. The same on every rank."""
        if len(self.seat_S) != len(self.memory.token_S):
            self.seat_S = torch.full_like(self.memory.token_S, ABSENT)
        filed_B = torch.where(may_carry_B, self.seat_S[pair_B2[:, 0]], ABSENT)
        found = torch.cat([pair_B2, filed_B[:, None]], 1).tolist()  # the one look at the device's numbers a step
        sources = [seat if seat != ABSENT and self.slot_P[seat] == before else ABSENT for before, _, seat in found]
        free = iter(sorted(set(range(self.size)) - set(sources), key=self.used_P.__getitem__))
        seats: list[Seat] = []
        for row, source in enumerate(sources):
            first = source != ABSENT and source not in sources[:row]  # requests that began alike share a source
            seats.append(Seat(source, source if first else next(free)))
        self.clock += 1
        for seat, (_, slot, _) in zip(seats, found, strict=True):
            self.slot_P[seat.target], self.used_P[seat.target] = slot, self.clock
        self.seat_S[step.slot_T.long().clamp_min(0)] = ABSENT
        self.seat_S[pair_B2[:, 1]] = torch.tensor([seat.target for seat in seats], device=pair_B2.device)
        return seats

    def _advance(self, logp_MNV: Tensor, token_N1: Tensor, seats: list[Seat]) -> Tensor:
        """One position further for requests that have a state."""
        source_N = torch.tensor([seat.source for seat in seats], device=token_N1.device)
        state = type(self.held)(*(tensor[source_N] for tensor in self.held))
        mask_N1 = torch.ones_like(token_N1, dtype=torch.bool)
        logp_N1V, state = self.rule(logp_MNV[:, :, None], token_N1, mask_N1, state)
        self._keep(state, [seat.target for seat in seats])
        return logp_N1V[:, 0]

    def _keep(self, state: Any, targets: list[int]) -> None:
        self._make_room(state)
        at_N = torch.tensor(targets, device=state[0].device)
        for held, new in zip(self.held, state, strict=True):
            held[at_N] = new

    def _make_room(self, state: Any) -> None:
        if self.held is None:
            self.held = type(state)(*(tensor.new_zeros(self.size, *tensor.shape[1:]) for tensor in state))
