"""What `mixture` remembers per request: π, kept for every position beside the cache, and rebuilt where it is not there.

vLLM's models see no requests, but they see where each position lies in the cache. So π is kept under the slot of the
last position that it has read. The request whose next position follows that slot goes on from it: its tokens up to
there are the same, since they are in the same blocks. A slot that is written again forgets what was kept under it. The
last position's rows, which say how likely the new token was, come from the hidden states in memory.py. In every other
case (a prompt just read, in one chunk or several; a request that was preempted) the rule is run again from where the
answer begins, with the prior of the prompt before it.

Where an answer begins, the chat template's marks say (model/transcript.py). Without them a text is an answer from its
first token on, or, with a router, a prompt at each of whose positions the prior is that of the tokens so far.

Shapes: B requests of the batch, N rows, T positions, M members, C components, V vocabulary, H hidden, S slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


class States:
    """The states of all requests in the cache."""

    def __init__(self, routing: Routing, memory: Memory, row_elements: int, logprobs: Logprobs):
        self.routing, self.rule, self.memory, self.logprobs = routing, routing.rule, memory, logprobs
        self.row_elements = row_elements  # numbers in one position's log-probabilities, all members together
        self.telling = routing.marks.tokens
        self.answer_S = torch.tensor([])  # the position at which the answer begins; ABSENT: no π is kept there
        self.prior_SC = self.log_pi_SC = torch.tensor([])

    def last_rows(self, step: Step, hidden_BH: Tensor) -> Tensor | None:
        """The composed log-probabilities after each request's last token: [B, V]."""
        batch, device = len(hidden_BH), hidden_BH.device
        self._make_room()
        last_B = step.length_B[:batch].long() - 1
        pair_B2 = torch.stack([(last_B - 1).clamp_min(0), last_B], 1)
        slot_B2 = self.memory.slots(step, torch.arange(batch, device=device), pair_B2)
        alone_B = (step.start_B[1 : batch + 1] - step.start_B[:batch] == 1) & (last_B > 0)
        before_B = torch.where(alone_B, self.answer_S[slot_B2[:, 0]], ABSENT)
        columns = [before_B, self.memory.token_S[slot_B2[:, 1]], last_B]
        found = torch.stack(columns, 1).tolist()  # the one look at the device's numbers a step
        answers = [self._continued(step, row, *each) for row, each in enumerate(found)]
        self.answer_S[step.slot_T.long().clamp_min(0)] = ABSENT
        logp_BV: dict[int, Tensor] = {}
        carried = [row for row, answer in enumerate(answers) if answer != ABSENT]
        for start, stop in slices(len(carried), 2 * self.row_elements):
            some = carried[start:stop]
            rows_NV = self._advance(slot_B2[some], [answers[row] for row in some])
            logp_BV.update(zip(some, rows_NV if rows_NV is not None else (), strict=False))
        for row, (*_, last) in enumerate(found):
            if answers[row] == ABSENT and (row_V := self.replay(step, row, last)) is not None:
                logp_BV[row] = row_V
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

    def replay(self, step: Step, row: int, last: int) -> Tensor | None:
        """Run the rule anew over a request's answer up to a position; return its row there, [V], and keep π."""
        ids = self._ids(step, row, last)
        answer = self._answer(ids)
        begin = last if answer is None or answer > last else max(answer - 1, 0)
        slot_1 = self._slots(step, row, [last])
        if answer is not None:
            self.answer_S[slot_1] = answer
        found = self._run(step, row, ids, begin, last)
        if found is None:
            return None
        self._keep(slot_1, found[1])
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
        state, rows = None, []
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
            rows.append(logp_1TV[0])
        return (torch.cat(rows), state) if rows else None

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

    def _continued(self, step: Step, row: int, answer: int, token: int, last: int) -> int:
        """Where the answer begins to which this token belongs, if π before it is kept; else ABSENT."""
        if answer != ABSENT and token in self.telling:  # no other token ends a mark
            answer = found if (found := self._answer(self._ids(step, row, last))) is not None else ABSENT
        return answer if answer <= last else ABSENT

    def _advance(self, slot_N2: Tensor, answers: list[int]) -> Tensor | None:
        """One position further for requests whose π is kept: their rows, [N, V]."""
        self.answer_S[slot_N2[:, 1]] = torch.tensor(answers, device=slot_N2.device)
        logp_MXV = self.logprobs(self.memory.recall(slot_N2.flatten()))
        if logp_MXV is None:
            return None
        before_N = slot_N2[:, 0]
        state = self.rule.init_state(self.prior_SC[before_N], logp_MXV.shape[-1])
        state = state._replace(log_pi_BC=self.log_pi_SC[before_N])
        token_N2 = self.memory.token_S[slot_N2]
        logp_N2V, state = self.rule(logp_MXV.unflatten(1, (-1, 2)), token_N2, torch.ones_like(token_N2).bool(), state)
        self._keep(slot_N2[:, 1], state)
        return logp_N2V[:, 1]

    def _keep(self, slot_N: Tensor, state: Any) -> None:
        self.prior_SC[slot_N], self.log_pi_SC[slot_N] = state.prior_BC.float(), state.log_pi_BC.float()

    def _make_room(self) -> None:
        token_S = self.memory.token_S
        if len(self.answer_S) != len(token_S):
            components = len(self.rule.component_weights(len(self.routing.members) - 1))
            self.answer_S = torch.full_like(token_S, ABSENT)
            self.prior_SC = torch.zeros(len(token_S), components, device=token_S.device)
            self.log_pi_SC = torch.zeros_like(self.prior_SC)
