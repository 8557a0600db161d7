"""Choose the next token: greedily, or sampled with noise that depends on the request's seed and position alone.

So a sampled text does not depend on which other requests are in the batch. Runs on the device, never waits for it.
`SamplingBuffers` holds the parameters of all slots there: a captured forward is a function of such tensors alone.

Shapes: S slots, B rows of a forward, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from ..errors import GenerationError
from ..model.temperature import COLDEST, check_temperature

LEAST_ALLOWED = -1e30  # the log-probability of what may be chosen although all members exclude it


class TokenChoice(IntEnum):
    """How a pass chooses tokens. Each way can do what those before it can: a batch takes the largest of its rows."""

    NONE = 0  # chooses nothing: the prompt goes on in another pass
    GREEDY = 1
    SAMPLED = 2
    NUCLEUS = 3  # top_p, top_k
    PENALISED = 4


@dataclass(frozen=True)
class Sampling:
    """Say how long a request's text may be and how its tokens are chosen."""

    max_new_tokens: int = 128
    temperature: float = 0.0  # 0 decodes greedily
    top_p: float = 1.0
    seed: int = 0
    ignore_end: bool = False  # go on past end tokens: for measurements
    top_k: int = 0  # the likeliest tokens that may be chosen; 0: all
    frequency_penalty: float = 0.0  # off a token's log-probability, for each time that it was written
    presence_penalty: float = 0.0  # the same, once
    choice: TokenChoice = field(init=False, repr=False, compare=False)  # the least that can do all of this

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise GenerationError(f"expected at least one new token; got max_new_tokens={self.max_new_tokens}")
        check_temperature(self.temperature)
        if not 0 < self.top_p <= 1:
            raise GenerationError(f"expected 0 < top_p ≤ 1; got {self.top_p}")
        if self.top_k < 0:
            raise GenerationError(f"expected top_k ≥ 0; got {self.top_k}")
        if not (math.isfinite(self.frequency_penalty) and math.isfinite(self.presence_penalty)):
            raise GenerationError("expected finite penalties")
        if not 0 <= self.seed < 2**63:
            raise GenerationError(f"expected a seed from 0 to 2^63 − 1; got {self.seed}")
        choice = TokenChoice.NUCLEUS if self.top_p < 1 or self.top_k else TokenChoice.SAMPLED
        if self.temperature == 0:
            choice = TokenChoice.GREEDY
        if self.frequency_penalty or self.presence_penalty:
            choice = TokenChoice.PENALISED
        object.__setattr__(self, "choice", choice)


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

    def choose(
        self, logp_BV: Tensor, at: Any, position_B: Tensor, choice: TokenChoice, allowed_BV: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Choose the token at a position of each of the slots `at`, among those allowed; its log-probability among
        all."""
        chosen_BV = logp_BV
        if allowed_BV is not None:
            chosen_BV = logp_BV.clamp_min(LEAST_ALLOWED).masked_fill(~allowed_BV, -torch.inf)
        if choice is TokenChoice.GREEDY:
            logprob_B, token_B = chosen_BV.max(-1)
            return token_B, logprob_B if allowed_BV is None else logp_BV.gather(-1, token_B[:, None])[:, 0]
        noise_B = uniform(self.seed_S[at], position_B)
        if choice is TokenChoice.PENALISED:
            chosen_BV = penalised(chosen_BV, self.counts[0][at], self.frequency_S[at], self.presence_S[at])
        token_B = choose(chosen_BV, self.temperature_S[at], self.top_p_S[at], self.top_k_S[at], noise_B, choice)
        return token_B, logp_BV.gather(-1, token_B[:, None])[:, 0]


def uniform(seed_B: Tensor, position_B: Tensor) -> Tensor:
    """Hash a seed and a position to a number in [0, 1), in float64: the finaliser of SplitMix64 on int64 tensors."""
    x = seed_B * -0x61C8864680B583EB + position_B * -0x40A7B892E31B1A47 + 0x1234567
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1)):
        logical = (x >> shift) & ((1 << (64 - shift)) - 1)
        x = (x ^ logical) * factor
    return ((x >> 11) & ((1 << 53) - 1)).double() / float(1 << 53)


def penalised(logp_BV: Tensor, count_BV: Tensor, frequency_B: Tensor, presence_B: Tensor) -> Tensor:
    """Take off log-probabilities what tokens cost that were written before: OpenAI's penalties."""
    cost_BV = count_BV * frequency_B[:, None] + (count_BV > 0) * presence_B[:, None]
    return logp_BV - cost_BV.to(logp_BV.dtype)


def choose(
    logp_BV: Tensor, temperature_B: Tensor, top_p_B: Tensor, top_k_B: Tensor, noise_B: Tensor, choice: TokenChoice
) -> Tensor:
    """Sample the next token of each row; rows with temperature 0 are greedy whatever the others need."""
    warm_BV = logp_BV / temperature_B.clamp_min(COLDEST)[:, None].to(logp_BV.dtype)
    probability_BV = warm_BV.softmax(-1)
    if choice >= TokenChoice.NUCLEUS:
        probability_BV = probability_BV.masked_fill(_outside(probability_BV, top_p_B, top_k_B), 0.0)
    return torch.where(temperature_B > 0, _invert(probability_BV, noise_B), logp_BV.argmax(-1))


def _outside(probability_BV: Tensor, top_p_B: Tensor, top_k_B: Tensor) -> Tensor:
    """Mark tokens that may not be chosen: all but the likeliest k, and of those all behind a share p of their mass."""
    sorted_BV, order_BV = probability_BV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(sorted_BV.shape[-1], device=sorted_BV.device)
    behind_BV = (rank_V >= top_k_B[:, None]) & (top_k_B > 0)[:, None]  # in sorted order
    left_B1 = sorted_BV.masked_fill(behind_BV, 0.0).sum(-1, keepdim=True)
    share_B1 = top_p_B[:, None] * torch.where(top_k_B[:, None] > 0, left_B1, 1.0)
    before_BV = sorted_BV.cumsum(-1) - sorted_BV
    behind_BV = behind_BV | ((before_BV >= share_B1) & (top_p_B < 1)[:, None])
    return torch.zeros_like(behind_BV).scatter(-1, order_BV, behind_BV)


def _invert(mass_BV: Tensor, noise_B: Tensor) -> Tensor:
    """Find the index at which the running sum passes a share of the whole; never one without mass."""
    total_BV = mass_BV.double().cumsum(-1)
    wanted_B1 = noise_B.clamp_max(1 - 2**-40)[:, None] * total_BV[:, -1:]
    return (total_BV <= wanted_B1).sum(-1).clamp_max(mass_BV.shape[-1] - 1)
