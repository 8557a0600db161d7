"""What a captured forward reads and writes of the slots: a number or a row per slot, on the device.

Shapes: S slots, M members, L = M + 1 components: every member, and a product of experts with weights of the slot's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from ...errors import FastPathError
from ..components import Components
from ..sampling import SamplingBuffers


class Mixing(Enum):
    """How a forward combines members."""

    RULE = "rule"  # by the composition's own, in all slots
    COMPONENTS = "components"  # by each slot's components and posterior


@dataclass(frozen=True)
class MixingBuffers:
    """The components of each slot."""

    log_pi_SL: Tensor
    prior_SL: Tensor
    count_SM: Tensor  # how often each member counts in the product

    @staticmethod
    def empty(slots: int, members: int, device: torch.device) -> MixingBuffers:
        prior_SL = torch.zeros(slots, members + 1, device=device)
        prior_SL[:, 0] = 1.0
        count_SM = torch.zeros(slots, members, device=device)
        count_SM[:, 0] = 1.0
        return MixingBuffers(prior_SL.log(), prior_SL, count_SM)

    @property
    def tensors(self) -> list[Tensor]:
        return [self.log_pi_SL, self.prior_SL, self.count_SM]

    def enter(self, slot: int, components: Components, put: Callable[[Tensor], Tensor]) -> None:
        """Write a request's components; `put` copies to the device."""
        given_X = put(laid_out(components, self.count_SM.shape[1]))
        prior_L, count_M = given_X.split([self.prior_SL.shape[1], self.count_SM.shape[1]])
        self.prior_SL[slot].copy_(prior_L)
        self.log_pi_SL[slot].copy_(prior_L.log())
        self.count_SM[slot].copy_(count_M)


def laid_out(components: Components, members: int) -> Tensor:
    """Return a prior over every member and one product, and how often each member counts in that."""
    prior, weight = [0.0] * (members + 1), [0.0] * members
    for row, share in zip(components.weights, components.prior, strict=True):
        experts = {m: w for m, w in zip(components.members[-len(row) :] if row else (), row, strict=True) if w}
        if not experts:
            prior[0] += share
        elif list(experts.values()) == [1.0]:
            prior[next(iter(experts))] += share
        elif prior[members]:
            raise FastPathError("this device runs one product of experts beside lone members: leave out styles")
        else:
            prior[members] = share
            for member, number in experts.items():
                weight[member] = number
    weight[0] = 1 - sum(weight)
    return torch.tensor([*prior, *weight])


@dataclass(frozen=True)
class SlotBuffers:
    """A position of −1 marks a slot that is not decoding."""

    token_S: Tensor  # chosen last: the next step reads it
    position_S: Tensor  # where it will stand
    logprob_S: Tensor
    nonfinite_SM: Tensor  # members whose last log-probabilities are NaN
    index_S: Tensor  # 0, 1, …
    sampling: SamplingBuffers
    mixing: MixingBuffers

    @staticmethod
    def empty(slots: int, members: int, device: torch.device) -> SlotBuffers:
        index_S = torch.arange(slots, device=device)
        return SlotBuffers(
            token_S=torch.zeros_like(index_S),
            position_S=torch.full_like(index_S, -1),
            logprob_S=torch.zeros(slots, device=device),
            nonfinite_SM=torch.zeros(slots, members, dtype=torch.bool, device=device),
            index_S=index_S,
            sampling=SamplingBuffers.empty(slots, device),
            mixing=MixingBuffers.empty(slots, members, device),
        )

    @property
    def tensors(self) -> list[Tensor]:
        """List the buffers that forwards and moves change."""
        own = [self.token_S, self.position_S, self.logprob_S, self.nonfinite_SM]
        return [*own, *self.sampling.tensors, *self.mixing.tensors]
