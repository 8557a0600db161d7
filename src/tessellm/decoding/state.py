"""What the device knows of the slots: last token, position, sampling, and the rule's state; and one step over them.

A step is a function of these buffers alone, so that it can be captured once and replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..model import ComposedForCausalLM
from ..model.rows import slices
from ..rules import Explanation, normalised, working_dtype
from .cuda.compiled_rule import Decided, PlainRule, best
from .members.groups import Members, member_logits
from .requests import Request
from .sampling import choose, penalised, uniform
from .voices import Special, Voice

READ_AT_ONCE = 1 << 20  # log-probabilities of a prompt, on a CPU: as many as its cache holds
READ_AT_ONCE_ON_GPU = 1 << 28  # a GiB, of which a rule makes several


def part(state: Any, slots: Any) -> Any:
    """A rule's state in some slots."""
    return state if state is None else type(state)(*(buffer[slots] for buffer in state))


class SlotState:
    """Buffers of S slots. A position of −1 marks a slot that nobody uses."""

    def __init__(self, model: ComposedForCausalLM, groups: Sequence[Members], slots: int):
        device = model.device
        self.rule, self.groups, self.device = model.rule, groups, device
        self.vocab_size = model.config.vocab_size
        self.row_numbers = len(model.members) * self.vocab_size  # log-probabilities of one position
        self.token_S = torch.zeros(slots, dtype=torch.long, device=device)
        self.position_S = torch.full((slots,), -1, device=device)
        self.temperature_S = torch.zeros(slots, device=device)
        self.top_p_S = torch.ones(slots, device=device)
        self.seed_S = torch.zeros(slots, dtype=torch.long, device=device)
        self.top_k_S = torch.zeros(slots, dtype=torch.long, device=device)
        self.frequency_S, self.presence_S = torch.zeros(slots, device=device), torch.zeros(slots, device=device)
        self._asked: list[tuple[float, ...]] = [(0.0, 1.0, 0, 0, 0.0, 0.0)] * slots  # what those six hold, for the host
        self.count_SV: Tensor | None = None  # how often each token was written, once a request has penalties
        self.logprob_S = torch.zeros(slots, device=device)
        self.passes = PlainRule(model.rule)  # a GPU's steps put a compiled one here
        self.rule_state: Any = None  # a NamedTuple of buffers, slot first, where the rule has a state
        self.other_states: dict[tuple, Any] = {}  # the same for other voices, by the kind of their states
        self.kinds: WeakKeyDictionary[Voice, tuple] = WeakKeyDictionary()

    def decode(self, rows: int, cells: int, how: str, special: Special | None = None) -> None:
        """One token more for each of the first `rows` slots."""
        token_B1, position_B1 = self.token_S[:rows, None], self.position_S[:rows, None]
        logits_M = member_logits(self.groups, token_B1, position_B1, rows, cells, 1)
        real_B1 = position_B1 >= 0
        if special is None:
            before = part(self.rule_state, slice(rows))
            token_B, logprob_B, state = self.by_rule(logits_M, token_B1, real_B1, before, position_B1[:, 0] + 1, how)
            states = [(self.rule_state, slice(rows), state)]
        else:
            logp_BV, states = self._by_voice(special, logits_M, token_B1, real_B1)
            token_B, logprob_B = self._choose(logp_BV, slice(rows), position_B1[:, 0] + 1, how)
            special.watch(logits_M, logp_BV, token_B)
        for buffers, slots, state in states:  # after all that may run out of memory, so that a step can be tried again
            for buffer, new in zip(buffers or (), state or (), strict=True):
                buffer[slots] = new
        self._note(slice(rows), token_B, logprob_B)
        self._count(slice(rows), token_B, real_B1[:, 0], how)
        self.position_S[:rows] += real_B1[:, 0].long()

    def by_rule(
        self, logits_M: Sequence[Tensor], token_B1: Tensor, real_B1: Tensor, state: Any, position_B: Tensor, how: str
    ) -> Decided:
        """The tokens that the first slots write next, at those positions, their log-probabilities, the rule's state."""
        if how == "greedy":
            return self.passes.decide(logits_M, token_B1, real_B1, state)
        said_B1V, state = self.passes.combine(logits_M, token_B1, real_B1, state)
        return *self._choose(said_B1V[:, -1], slice(len(token_B1)), position_B, how), state

    def _by_voice(
        self, special: Special, logits_M: Sequence[Tensor], token_B1: Tensor, real_B1: Tensor
    ) -> tuple[Tensor, list[tuple[Any, Any, Any]]]:
        """What every voice says in its rows, and their new states: buffers, slots, state."""
        logp_BV, states = torch.zeros_like(logits_M[0][:, -1], dtype=working_dtype(logits_M[0])), []
        for voice, at in special.voices.items():
            at_B = torch.tensor(at, device=self.device)
            buffers = self.other_states.get(self.kinds.get(voice, ())) if voice else self.rule_state
            heard_M = [logits[at_B] for logits in logits_M]
            rule = voice.rule if voice else self.rule
            said_B1V, state, special.why[voice] = rule.explain(
                normalised(heard_M), token_B1[at_B], real_B1[at_B], part(buffers, at_B)
            )
            logp_BV[at_B] = said_B1V[:, -1]
            states.append((buffers, at_B, state))
        return logp_BV, states

    def prefill(
        self,
        slot_B: Tensor,
        token_BT: Tensor,
        position_BT: Tensor,
        cells: int,
        how: str | None,
        special: Special | None = None,
        start: int | None = None,
    ) -> None:
        """Feed tokens (left-padded: position −1). `how` its first new token is chosen; None: it is not at its end.
        `start` as for a group."""
        window = special.window(self.rule) if special else self.rule.window
        keep = min(token_BT.shape[1], window + 1) if how else 1
        logits_M = member_logits(self.groups, token_BT, position_BT, slot_B, cells, keep, start)
        if how is None:
            return
        heard_BT, real_BT = token_BT[:, -keep:], position_BT[:, -keep:] >= 0
        if special is None:
            logp_BV, _ = self._begin(None, logits_M, heard_BT, real_BT, slot_B)
        else:
            logp_BV = torch.zeros_like(logits_M[0][:, -1], dtype=working_dtype(logits_M[0]))
            for voice, at in special.voices.items():
                at_B = torch.tensor(at, device=self.device)
                heard_M = [logits[at_B] for logits in logits_M]
                logp_BV[at_B], special.why[voice] = self._begin(
                    voice, heard_M, heard_BT[at_B], real_BT[at_B], slot_B[at_B]
                )
        token_B, logprob_B = self._choose(logp_BV, slot_B, position_BT[:, -1] + 1, how)
        if special is not None:
            special.watch(logits_M, logp_BV, token_B)
        self._note(slot_B, token_B, logprob_B)
        self._count(slot_B, token_B, position_BT[:, -1] >= 0, how)
        self.position_S[slot_B] = position_BT[:, -1] + 1

    def _begin(
        self, voice: Voice | None, logits_M: Sequence[Tensor], token_BT: Tensor, real_BT: Tensor, slot_B: Tensor
    ) -> tuple[Tensor, Explanation]:
        """What a rule says after a prompt, and why; its state begins."""
        rule = voice.rule if voice else self.rule
        state: Any = None
        elements = len(logits_M) * logits_M[0][:, :1].numel()
        most = READ_AT_ONCE if self.device.type == "cpu" else READ_AT_ONCE_ON_GPU
        for start, stop in slices(token_BT.shape[1], elements, most):
            logp_MBTV = normalised([logits[:, start:stop] for logits in logits_M])
            logp_BTV, state, why = rule.explain(logp_MBTV, token_BT[:, start:stop], real_BT[:, start:stop], state)
        if state is not None:
            for buffer, new in zip(self._buffers_for(voice, state), state, strict=True):
                buffer[slot_B] = new
        return logp_BTV[:, -1], why.map(lambda column: column[:, -1:])

    def _buffers_for(self, voice: Voice | None, state: Any) -> Any:
        """Voices whose states are of one kind share buffers: a slot has one voice at a time."""
        if voice is None:
            if self.rule_state is None:
                self.rule_state = self._empty(state)
            return self.rule_state
        kind = (type(state), *((new.shape[1:], new.dtype) for new in state))
        if kind not in self.other_states:
            self.other_states[kind] = self._empty(state)
        self.kinds[voice] = kind
        return self.other_states[kind]

    def _empty(self, state: Any) -> Any:
        return type(state)(*(new.new_zeros(len(self.token_S), *new.shape[1:]) for new in state))

    def _choose(self, logp_BV: Tensor, slots: Any, position_B: Tensor, how: str) -> tuple[Tensor, Tensor]:
        """The next token of each row, and its log-probability."""
        if how == "greedy":
            return best(logp_BV)
        noise_B = uniform(self.seed_S[slots], position_B)
        said_BV = logp_BV
        if how == "penalised" and self.count_SV is not None:
            said_BV = penalised(logp_BV, self.count_SV[slots], self.frequency_S[slots], self.presence_S[slots])
        asked = self.temperature_S[slots], self.top_p_S[slots], self.top_k_S[slots]
        token_B = choose(said_BV, *asked, noise_B, how)
        return token_B, logp_BV.gather(-1, token_B[:, None])[:, 0]

    def _note(self, slots: Any, token_B: Tensor, logprob_B: Tensor) -> None:
        self.token_S[slots] = token_B
        self.logprob_S[slots] = logprob_B.float()

    def _count(self, slots: Any, token_B: Tensor, real_B: Tensor, how: str) -> None:
        """Count what was written, where a request is penalised for it."""
        if how == "penalised" and self.count_SV is not None:
            slot_B = torch.arange(len(self.count_SV), device=self.device)[slots]
            self.count_SV.index_put_((slot_B, token_B), real_B.to(self.count_SV.dtype), accumulate=True)

    def enter(self, request: Request) -> None:
        """What a request asks for, into its slot, as far as it is not there: each number is a launch on a GPU."""
        slot, sampling = request.slot, request.sampling
        assert slot is not None
        asked = (
            sampling.temperature, sampling.top_p, sampling.seed, sampling.top_k,
            sampling.frequency_penalty, sampling.presence_penalty,
        )  # fmt: skip
        buffers = self.temperature_S, self.top_p_S, self.seed_S, self.top_k_S, self.frequency_S, self.presence_S
        for buffer, old, new in zip(buffers, self._asked[slot], asked, strict=True):
            if old != new:
                buffer[slot] = new
        self._asked[slot] = asked
        if sampling.penalises:
            self._forget_counts(slot)

    def _forget_counts(self, slot: int) -> None:
        if self.count_SV is None:
            self.count_SV = torch.zeros(len(self.token_S), self.vocab_size, device=self.device)
        self.count_SV[slot] = 0.0

    def leave(self, slot: int) -> None:
        self.position_S[slot] = -1

    def move(self, source: int, target: int, cells: int) -> None:
        """A running sequence into another slot."""
        for buffer in self.buffers:
            buffer[target] = buffer[source]
        self._asked[target] = self._asked[source]
        self.copy_cells(source, target, cells)
        self.leave(source)

    @property
    def buffers(self) -> list[Tensor]:
        """All that is known of the slots but their caches."""
        own = [self.token_S, self.position_S, self.temperature_S, self.top_p_S, self.seed_S, self.logprob_S]
        own += [self.top_k_S, self.frequency_S, self.presence_S, *([] if self.count_SV is None else [self.count_SV])]
        others = [buffer for buffers in self.other_states.values() for buffer in buffers]
        return [*own, *(self.rule_state or ()), *others]

    def copy_cells(self, source: int, target: int, cells: int) -> None:
        for group in self.groups:
            group.cache.copy_slot(source, target, cells)
