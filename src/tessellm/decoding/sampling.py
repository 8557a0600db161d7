"""How the next token is chosen: greedily, or sampled with noise that depends on the request's seed and position alone.

So a sampled text does not depend on which other requests were in the batch. On the device, without looking at it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import GenerationError
from ..model.temperature import COLDEST, check_temperature


@dataclass(frozen=True)
class Sampling:
    """What one request asks for."""

    max_new_tokens: int = 128
    temperature: float = 0.0  # 0 decodes greedily
    top_p: float = 1.0
    seed: int = 0
    ignore_end: bool = False  # go on past end tokens: for measurements

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise GenerationError(f"expected at least one new token; got max_new_tokens={self.max_new_tokens}")
        check_temperature(self.temperature)
        if not 0 < self.top_p <= 1:
            raise GenerationError(f"expected 0 < top_p ≤ 1; got {self.top_p}")
        if not 0 <= self.seed < 2**63:
            raise GenerationError(f"expected a seed from 0 to 2^63 − 1; got {self.seed}")


def uniform(seed_B: Tensor, position_B: Tensor) -> Tensor:
    """One number in [0, 1) from a seed and a position, in float64: the finaliser of SplitMix64 on int64 tensors."""
    x = seed_B * -0x61C8864680B583EB + position_B * -0x40A7B892E31B1A47 + 0x1234567
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1)):
        logical = (x >> shift) & ((1 << (64 - shift)) - 1)
        x = (x ^ logical) * factor
    return ((x >> 11) & ((1 << 53) - 1)).double() / float(1 << 53)


def how(samplings: Iterable[Sampling]) -> str:
    """What a batch of requests needs: greedy, sampled, or nucleus, each of which can do what the ones before it can."""
    warm = [each for each in samplings if each.temperature > 0]
    return "greedy" if not warm else "nucleus" if any(each.top_p < 1 for each in warm) else "sampled"


def choose(logp_BV: Tensor, temperature_B: Tensor, top_p_B: Tensor, noise_B: Tensor, how: str) -> Tensor:
    """The next token of each row; rows with temperature 0 are greedy whatever the others need."""
    greedy_B = logp_BV.argmax(-1)
    if how == "greedy":
        return greedy_B
    warm_BV = logp_BV / temperature_B.clamp_min(COLDEST)[:, None].to(logp_BV.dtype)
    probability_BV = warm_BV.softmax(-1)
    if how == "nucleus":
        sorted_BV, order_BV = probability_BV.sort(dim=-1, descending=True, stable=True)
        before_BV = sorted_BV.cumsum(-1) - sorted_BV
        outside_BV = (before_BV >= top_p_B[:, None]) & (top_p_B < 1)[:, None]  # in the order of the sorted
        outside_BV = torch.zeros_like(outside_BV).scatter(-1, order_BV, outside_BV)
        probability_BV = probability_BV.masked_fill(outside_BV, 0.0)
    return torch.where(temperature_B > 0, _invert(probability_BV, noise_B), greedy_B)


def _invert(mass_BV: Tensor, noise_B: Tensor) -> Tensor:
    """The index at which the running sum passes a share of the whole; never one without mass."""
    total_BV = mass_BV.double().cumsum(-1)
    wanted_B1 = noise_B.clamp_max(1 - 2**-40)[:, None] * total_BV[:, -1:]
    return (total_BV <= wanted_B1).sum(-1).clamp_max(mass_BV.shape[-1] - 1)
