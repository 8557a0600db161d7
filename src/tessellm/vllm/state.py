"""What `mixture` remembers per request: carried from token to token, rebuilt from memory.py where it is not there.

vLLM's models see no requests, but they see where each position lies in the cache. A state is filed under the slot of
the last position that it has read. The request whose next position follows that slot may use it: its tokens up to there
are the same, since they are in the same blocks. A slot that is written again forgets what was filed under it. In every
other case (a prompt just read, in one chunk or several; a prefix found in the cache; a request that was preempted) the
rule is run again from where the answer begins, with the prior of the prompt before it.

Where an answer begins, the chat template's marks say (model/transcript.py). Without them a text is an answer from its
first token on, or, with a router, a prompt at each of whose positions the prior is that of the tokens so far.

Shapes: B requests of the batch, N rows, T positions, M members, V vocabulary, H hidden, S slots, P states held.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..model.rows import slices
from ..model.transcript import Routing, in_answers
from ..routing import RoutedPrompt
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

    def __init__(self, routing: Routing, memory: Memory, size: int, row_elements: int, logprobs: Logprobs):
        self.routing, self.rule, self.memory, self.size, self.logprobs = routing, routing.rule, memory, size, logprobs
        self.row_elements = row_elements  # numbers in one position's log-probabilities, all members together
        self.telling = routing.marks.tokens
        self.held: Any = None  # the rule's state, P rows
        self.seat_S = torch.tensor([])  # which state is filed under each slot
        self.slot_P = [ABSENT] * size  # the slot of each state,
        self.answer_P: list[int | None] = [None] * size  # the position at which its answer begins,
        self.used_P = [0] * size  # and when it was last used
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
        seats, ends = self._seats(step, pair_B2, last_B, alone_B & (last_B > 0))
        carried = [row for row, seat in enumerate(seats) if seat.source != ABSENT]
        logp_BV: dict[int, Tensor] = {}
        if carried:
            logp_MNV = self.logprobs(hidden_BH[carried])
            if logp_MNV is not None:
                token_N1 = self.memory.token_S[pair_B2[carried, 1:]]
                rows = self._advance(logp_MNV, token_N1, [seats[row] for row in carried])
                logp_BV.update(zip(carried, rows, strict=True))
        for row, (seat, end) in enumerate(zip(seats, ends, strict=True)):
            if seat.source == ABSENT:
                found = self.replay(step, row, end, seat)
                if found is not None:
                    logp_BV[row] = found
        return torch.stack([logp_BV[row] for row in range(batch)]) if logp_BV else None

    def rows(self, step: Step, first: int, hidden_NH: Tensor) -> Tensor | None:
        """The composed log-probabilities after the batch's tokens from `first` on: [N, V]."""
        starts, lengths = step.start_B.tolist(), step.length_B.tolist()
        parts, stop = [], first + len(hidden_NH)
        for row, (start, end) in enumerate(pairwise(starts)):
            left, right = max(first, start), min(stop, end)
            if left < right:
                offset = lengths[row] - end  # from a place in the batch to a position of the request
                parts.append(self._stretch(step, row, left + offset, right - 1 + offset))
        whole = [part for part in parts if part is not None]
        return torch.cat(whole) if whole else None

    def replay(self, step: Step, row: int, last: int, seat: Seat) -> Tensor | None:
        """Run the rule anew over a request's answer up to a position; return its row there, [V], and keep the state."""
        ids = self._ids(step, row, last)
        answer = self.answer_P[seat.target] = self._answer(ids)
        begin = last if answer is None or answer > last else max(answer - 1, 0)
        found = self._run(step, row, ids, begin, last)
        if found is None:
            return None
        self._keep(found[1], [seat.target])
        return found[0][-1]

    def _stretch(self, step: Step, row: int, first: int, last: int) -> Tensor | None:
        """A request's rows from `first` to `last`, [T, V]. The rule begins anew at each position of a prompt."""
        ids = self._ids(step, row, last)
        marks = self.routing.marks
        answering = in_answers(marks, ids) if marks.answer else [self.routing.router is None] * len(ids)
        begin = max((position for position in range(first + 1) if not answering[position]), default=0)
        starts = [position for position in range(begin, last + 1) if position == begin or not answering[position]]
        ends = [*(start - 1 for start in starts[1:]), last]
        alone = [start for start, end in zip(starts, ends, strict=True) if start == end]
        found = self._each_alone(step, row, ids, alone)
        for start, end in zip(starts, ends, strict=True):
            if start < end and (run := self._run(step, row, ids, start, end)) is not None:
                found.update(zip(range(start, end + 1), run[0], strict=True))
        return torch.stack([found[position] for position in range(first, last + 1)]) if found else None

    def _each_alone(self, step: Step, row: int, ids: list[int], positions: list[int]) -> dict[int, Tensor]:
        """Rows of positions at which the rule begins anew."""
        found: dict[int, Tensor] = {}
        for start, stop in slices(len(positions), self.row_elements):
            some = positions[start:stop]
            logp_MNV = self.logprobs(self.memory.recall(self._slots(step, row, some)))
            if logp_MNV is not None:
                state = self._begun(step, row, ids, some, logp_MNV)
                token_N1 = torch.tensor([[ids[position]] for position in some], device=logp_MNV.device)
                mask_N1 = torch.ones_like(token_N1, dtype=torch.bool)
                found.update(zip(some, self.rule(logp_MNV[:, :, None], token_N1, mask_N1, state)[0][:, 0], strict=True))
        return found

    def _run(self, step: Step, row: int, ids: list[int], begin: int, last: int) -> tuple[Tensor, Any] | None:
        """Run the rule from where it begins anew: the rows up to `last`, [T, V], and the state."""
        state, said = None, []
        slot_T = self._slots(step, row, range(begin, last + 1))
        token_1T = torch.tensor([ids[begin : last + 1]], device=slot_T.device)
        for start, stop in slices(len(slot_T), self.row_elements):
            logp_MTV = self.logprobs(self.memory.recall(slot_T[start:stop]))
            if logp_MTV is None:
                continue
            if state is None:
                state = self._begun(step, row, ids, [begin], logp_MTV)
            tokens_1T = token_1T[:, start:stop]
            mask_1T = torch.ones_like(tokens_1T, dtype=torch.bool)
            logp_1TV, state = self.rule(logp_MTV[:, None], tokens_1T, mask_1T, state)
            said.append(logp_1TV[0])
        return (torch.cat(said), state) if said else None

    def _begun(self, step: Step, row: int, ids: list[int], positions: Sequence[int], like_MNV: Tensor) -> Any:
        """The state before each of some positions of a text, with the prior of the tokens up to it."""
        routing = self.routing
        if routing.router is None:
            prior_NC = self.rule.unrouted_prior(len(routing.members) - 1).repeat(len(positions), 1)
        else:
            energy_TK = self.memory.recall_energies(self._slots(step, row, range(max(positions) + 1)))
            upto = [position + 1 for position in positions]
            prompts = [RoutedPrompt(ids[:end], routing.marks.read(ids[:end]).user, energy_TK[:end]) for end in upto]
            prior_NC = routing.component_priors(prompts)
        return self.rule.init_state(prior_NC.to(like_MNV.device), like_MNV.shape[-1])

    def _answer(self, ids: Sequence[int]) -> int | None:
        """The position at which the answer of a text begins, if it has one; it may be the next."""
        if self.routing.marks.answer:
            return self.routing.marks.read(ids).answer
        return 0 if self.routing.router is None else None

    def _ids(self, step: Step, row: int, last: int) -> list[int]:
        tokens: list[int] = self.memory.token_S[self._slots(step, row, range(last + 1))].tolist()
        return tokens

    def _slots(self, step: Step, row: int, positions: Sequence[int]) -> Tensor:
        device = self.memory.token_S.device
        position_1T = torch.tensor([list(positions)], dtype=torch.long, device=device)
        return self.memory.slots(step, torch.tensor([row], device=device), position_1T)[0]

    def _seats(self, step: Step, pair_B2: Tensor, last_B: Tensor, may_carry_B: Tensor) -> tuple[list[Seat], list[int]]:
        """Who has a state, where everybody's will be filed, and the last positions. The same on every rank."""
        if len(self.seat_S) != len(self.memory.token_S):
            self.seat_S = torch.full_like(self.memory.token_S, ABSENT)
        filed_B = torch.where(may_carry_B, self.seat_S[pair_B2[:, 0]], ABSENT)
        columns = [pair_B2[:, 0], filed_B, self.memory.token_S[pair_B2[:, 1]], last_B, pair_B2[:, 1]]
        found = torch.stack(columns, 1).tolist()  # the one look at the device's numbers a step
        told = [self._carried(step, row, *each[:4]) for row, each in enumerate(found)]
        sources = [source for source, _ in told]
        free = iter(sorted(set(range(self.size)) - set(sources), key=self.used_P.__getitem__))
        seats: list[Seat] = []
        for row, source in enumerate(sources):
            first = source != ABSENT and source not in sources[:row]  # requests that began alike share a source
            seats.append(Seat(source, source if first else next(free)))
        self.clock += 1
        for seat, (_, answer), (*_, slot) in zip(seats, told, found, strict=True):
            self.slot_P[seat.target], self.used_P[seat.target] = slot, self.clock
            self.answer_P[seat.target] = answer
        self.seat_S[step.slot_T.long().clamp_min(0)] = ABSENT
        self.seat_S[pair_B2[:, 1]] = torch.tensor([seat.target for seat in seats], device=pair_B2.device)
        return seats, [last for *_, last, _ in found]

    def _carried(self, step: Step, row: int, before: int, filed: int, token: int, last: int) -> tuple[int, int | None]:
        """The state that goes on with this token, ABSENT if there is none, and where its answer began."""
        if filed == ABSENT or self.slot_P[filed] != before:
            return ABSENT, None
        answer = self.answer_P[filed]
        if token in self.telling:  # no other token ends a mark
            answer = self._answer(self._ids(step, row, last))
        return (filed, answer) if answer is not None and answer <= last else (ABSENT, None)

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
