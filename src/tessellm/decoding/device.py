"""What the device knows of the slots: last token, position, sampling, and the rule's state; and one step over them.

A step is a function of these buffers alone, so that it can be captured once and replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..model import ComposedForCausalLM
from ..rules import Rule, working_dtype
from .groups import Group, member_logits
from .requests import Request
from .sampling import choose, uniform


def combine(
    rule: Rule, logits_M: Sequence[Tensor], token_BT: Tensor, mask_BT: Tensor, state: Any
) -> tuple[Tensor, Any]:
    """The rule over the members' logits."""
    logp_MBTV = torch.stack([logits.to(working_dtype(logits)).log_softmax(-1) for logits in logits_M])
    return rule(logp_MBTV, token_BT, mask_BT, state)


class SlotState:
    """Buffers of S slots. A position of −1 marks a slot that nobody uses."""

    def __init__(self, model: ComposedForCausalLM, groups: Sequence[Group], slots: int):
        device = model.device
        self.rule, self.groups, self.device = model.rule, groups, device
        self.token_S = torch.zeros(slots, dtype=torch.long, device=device)
        self.position_S = torch.full((slots,), -1, device=device)
        self.temperature_S = torch.zeros(slots, device=device)
        self.top_p_S = torch.ones(slots, device=device)
        self.seed_S = torch.zeros(slots, dtype=torch.long, device=device)
        self.logprob_S = torch.zeros(slots, device=device)
        self.combine = partial(combine, model.rule)  # a GPU's steps put a compiled one here
        self.rule_state: Any = None  # a NamedTuple of buffers, slot first, where the rule has a state

    def decode(self, rows: int, cells: int, how: str) -> None:
        """One token more for each of the first `rows` slots."""
        token_B1, position_B1 = self.token_S[:rows, None], self.position_S[:rows, None]
        logits_M = member_logits(self.groups, token_B1, position_B1, rows, cells, 1)
        real_B1 = position_B1 >= 0
        state = self.rule_state
        if state is not None:
            state = type(state)(*(buffer[:rows] for buffer in state))
        logp_B1V, state = self.combine(logits_M, token_B1, real_B1, state)
        self._choose(logp_B1V[:, -1], slice(rows), position_B1[:, 0] + 1, how)
        if state is not None:  # after all that may run out of memory, so that a step can be tried again
            for buffer, new in zip(self.rule_state, state, strict=True):
                buffer[:rows] = new
        self.position_S[:rows] += real_B1[:, 0].long()

    def prefill(self, slot_B: Tensor, token_BT: Tensor, position_BT: Tensor, cells: int, how: str | None) -> None:
        """Feed tokens (left-padded: position −1). `how` its first new token is chosen; None: it is not at its end."""
        keep = min(token_BT.shape[1], self.rule.window + 1) if how else 1
        logits_M = member_logits(self.groups, token_BT, position_BT, slot_B, cells, keep)
        if how is None:
            return
        real_BT = position_BT[:, -keep:] >= 0
        logp_BTV, state = combine(self.rule, logits_M, token_BT[:, -keep:], real_BT, None)
        if state is not None:
            if self.rule_state is None:
                slots = len(self.token_S)
                self.rule_state = type(state)(*(new.new_zeros(slots, *new.shape[1:]) for new in state))
            for buffer, new in zip(self.rule_state, state, strict=True):
                buffer[slot_B] = new
        self._choose(logp_BTV[:, -1], slot_B, position_BT[:, -1] + 1, how)
        self.position_S[slot_B] = position_BT[:, -1] + 1

    def _choose(self, logp_BV: Tensor, slots: Any, position_B: Tensor, how: str) -> None:
        if how == "greedy":
            token_B = logp_BV.argmax(-1)
        else:
            noise_B = uniform(self.seed_S[slots], position_B)
            token_B = choose(logp_BV, self.temperature_S[slots], self.top_p_S[slots], noise_B, how)
        self.token_S[slots] = token_B
        self.logprob_S[slots] = logp_BV.gather(-1, token_B[:, None])[:, 0].float()

    def enter(self, request: Request) -> None:
        """What a request asks for, into its slot."""
        slot, sampling = request.slot, request.sampling
        self.position_S[slot] = -1
        self.temperature_S[slot] = sampling.temperature
        self.top_p_S[slot] = sampling.top_p
        self.seed_S[slot] = sampling.seed

    def leave(self, slot: int) -> None:
        self.position_S[slot] = -1

    def move(self, source: int, target: int, cells: int) -> None:
        """A running sequence into another slot."""
        for buffer in self.buffers:
            buffer[target] = buffer[source]
        self.copy_cells(source, target, cells)
        self.leave(source)

    @property
    def buffers(self) -> list[Tensor]:
        """All that is known of the slots but their caches."""
        own = [self.token_S, self.position_S, self.temperature_S, self.top_p_S, self.seed_S, self.logprob_S]
        return [*own, *(self.rule_state or ())]

    def copy_cells(self, source: int, target: int, cells: int) -> None:
        for group in self.groups:
            group.cache.copy_slot(source, target, cells)
