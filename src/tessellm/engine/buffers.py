"""What the device knows of the slots between forwards: tensors, one number per slot. A captured forward is a function
of them alone.

Shapes: S slots, M members, B rows of a forward, T tokens per row, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from .sampling import Sampling, TokenChoice, choose, penalised, uniform


class RowOrder(Enum):
    """Which slots the rows of a forward are."""

    ANY_SLOTS = "any"  # as slot_B says; tokens are padded on the left
    FIRST_SLOTS = "first"  # row b is slot b; tokens are padded on the right


@dataclass(frozen=True)
class TokenBatch:
    """The tokens of one forward over all members of some slots."""

    token_BT: Tensor
    position_BT: Tensor  # in the sequence; −1 is padding
    slot_B: Tensor
    cells: int  # that are read
    keep: int = 1  # last positions whose logits are wanted
    order: RowOrder = RowOrder.ANY_SLOTS
    start: int | None = None  # where all rows begin, if none has padding and the cells end with them


@dataclass(frozen=True)
class SamplingBuffers:
    """How the tokens of each slot are chosen."""

    temperature_S: Tensor
    top_p_S: Tensor
    seed_S: Tensor
    top_k_S: Tensor
    frequency_S: Tensor
    presence_S: Tensor
    given: list[Sampling | None]  # per slot, the parameters that the buffers hold
    counts: list[Tensor] = field(default_factory=list)  # times that each token was written, [S, V], if one is penalised

    @staticmethod
    def empty(slots: int, device: torch.device) -> SamplingBuffers:
        zero_S, whole_S = torch.zeros(slots, device=device), torch.zeros(slots, dtype=torch.long, device=device)
        return SamplingBuffers(
            temperature_S=zero_S,
            top_p_S=torch.ones_like(zero_S),
            seed_S=whole_S,
            top_k_S=whole_S.clone(),
            frequency_S=zero_S.clone(),
            presence_S=zero_S.clone(),
            given=[None] * slots,
        )

    @property
    def tensors(self) -> list[Tensor]:
        """List the buffers that forwards and moves change."""
        own = [self.temperature_S, self.top_p_S, self.seed_S, self.top_k_S, self.frequency_S, self.presence_S]
        return [*own, *self.counts]

    def enter(self, slot: int, sampling: Sampling, vocabulary: int) -> None:
        """Write a request's parameters, as far as the slot does not hold them: each number is a launch on a GPU.
        Filled: an item that is set to a number waits for all that the device does."""
        old, wanted = self.given[slot], {"temperature": self.temperature_S, "top_p": self.top_p_S, "seed": self.seed_S}
        penalties = {"frequency_penalty": self.frequency_S, "presence_penalty": self.presence_S}
        for name, buffer in (wanted | penalties | {"top_k": self.top_k_S}).items():
            if old is None or getattr(old, name) != getattr(sampling, name):
                buffer[slot].fill_(getattr(sampling, name))
        self.given[slot] = sampling
        if sampling.choice is TokenChoice.PENALISED:
            self.count_tokens(vocabulary)
            self.counts[0][slot].fill_(0.0)

    def count_tokens(self, vocabulary: int) -> None:
        """Make room for counts of what was written."""
        if not self.counts:
            self.counts.append(self.temperature_S.new_zeros(len(self.temperature_S), vocabulary))

    def choose(self, logp_BV: Tensor, at: Any, position_B: Tensor, choice: TokenChoice) -> tuple[Tensor, Tensor]:
        """Choose the token at a position of each of the slots `at`; its log-probability."""
        if choice is TokenChoice.GREEDY:
            logprob_B, token_B = logp_BV.max(-1)
            return token_B, logprob_B
        noise_B = uniform(self.seed_S[at], position_B)
        chosen_BV = logp_BV
        if choice is TokenChoice.PENALISED:
            chosen_BV = penalised(logp_BV, self.counts[0][at], self.frequency_S[at], self.presence_S[at])
        token_B = choose(chosen_BV, self.temperature_S[at], self.top_p_S[at], self.top_k_S[at], noise_B, choice)
        return token_B, logp_BV.gather(-1, token_B[:, None])[:, 0]


def row_bucket(needed: int, few: bool = False) -> int:
    """Round rows up to a power of two; to `few` numbers: 1, 4, 16, and powers of two from there on."""
    power = (needed - 1).bit_length()
    return 1 << (power + power % 2 if few and power < 4 else power)
