"""Rules without state: Eq. 2 with less of its tail noise. Pure functions of log-probabilities, and their rule objects.

Eq. 2 divides by the base once an expert, so k idle experts add up k errors in the tail, where nobody meant anything.
Each rule here lets the most divergent expert speak in full and listens less to the others. Each is a conservative
extension of Eq. 2: where at most one expert differs from the base, that one is the most divergent, the others say
what the base says, and leaving their ratios out, or zero, changes nothing.

Shapes: M members (0 is the base), K experts; any dimensions between the members and the vocabulary V.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .base import BaseRule, loudest_alone
from .protocol import Explanation

LOG_ZERO = -1e4  # log 0, in differences and sums
IMPOSSIBLE = -5e3  # a combined token below this was impossible for a speaking member


def divergence(logp_MBV: Tensor) -> Tensor:
    """KL(p_i ‖ p_b) of every expert: [K, B]."""
    safe_MBV = logp_MBV.clamp_min(LOG_ZERO)
    return (logp_MBV[1:].exp() * (safe_MBV[1:] - safe_MBV[:1])).sum(-1)


def is_largest(divergence_KB: Tensor) -> Tensor:
    """True for the most divergent expert, the first of equals: [K, B]."""
    index_K = torch.arange(divergence_KB.shape[0], device=divergence_KB.device)
    return index_K.view(-1, *[1] * (divergence_KB.dim() - 1)) == divergence_KB.argmax(0)


def add_ratios(logp_MBV: Tensor, ratio_KBV: Tensor) -> Tensor:
    """log p_b + Σ ratios, normalised."""
    logp_BV = (logp_MBV[0].clamp_min(LOG_ZERO) + ratio_KBV.sum(0)).log_softmax(-1)
    return logp_BV.masked_fill(logp_BV < IMPOSSIBLE, -torch.inf)


def ratios(logp_MBV: Tensor) -> Tensor:
    """log p_i − log p_b: [K, B, V], finite."""
    safe_MBV = logp_MBV.clamp_min(LOG_ZERO)
    return safe_MBV[1:] - safe_MBV[:1]


def owner(logp_MBV: Tensor) -> Tensor:
    """The most divergent expert speaks alone."""
    at_BV = divergence(logp_MBV).argmax(0)[None, ..., None].expand(1, *logp_MBV.shape[1:])
    return logp_MBV[1:].gather(0, at_BV)[0]


def relative_gate(logp_MBV: Tensor, share: float = 0.01) -> Tensor:
    """Eq. 2 over the experts that diverge by at least `share` of the largest divergence."""
    divergence_KB = divergence(logp_MBV)
    heard_KB = divergence_KB >= share * divergence_KB.amax(0)
    return add_ratios(logp_MBV, ratios(logp_MBV) * heard_KB[..., None])


def tail_floor(logp_MBV: Tensor, floor: float = 1e-3) -> Tensor:
    """Eq. 2, but below probability `floor` all members but the most divergent one look alike."""
    floored_MBV = logp_MBV.clamp_min(torch.tensor(floor).log().item())
    quiet_KBV = floored_MBV[1:] - floored_MBV[:1]
    loud_KB1 = is_largest(divergence(logp_MBV))[..., None]
    return add_ratios(logp_MBV, torch.where(loud_KB1, ratios(logp_MBV), quiet_KBV))


def plausibility(logp_MBV: Tensor, share: float = 0.1) -> Tensor:
    """Eq. 2, but an expert other than the most divergent one is heard only on tokens that it or the base finds
    plausible: at least `share` as probable as its, or the base's, favourite (after arXiv 2210.15097)."""
    cut_MB1 = logp_MBV.amax(-1, keepdim=True) + torch.tensor(share).log().item()
    plausible_MBV = logp_MBV >= cut_MB1
    heard_KBV = plausible_MBV[1:] | plausible_MBV[:1] | is_largest(divergence(logp_MBV))[..., None]
    return add_ratios(logp_MBV, ratios(logp_MBV) * heard_KBV)


GATES: dict[str, Callable[..., Tensor]] = {
    "owner": owner,
    "relative-gate": relative_gate,
    "tail-floor": tail_floor,
    "plausibility": plausibility,
}


class Gate(BaseRule):
    """A rule object over one of the functions above; its fields are the function's parameters."""

    def __post_init__(self) -> None:
        for key, value in vars(self).items():
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= 1:
                raise ValueError(f"{key} must be a probability above 0; got {value!r}")

    def __call__(self, logp_MBTV: Tensor, tokens_BT: Tensor, mask_BT: Tensor, state: Any) -> tuple[Tensor, Any]:
        logp_MBTV = logp_MBTV.to(torch.promote_types(logp_MBTV.dtype, torch.float32))
        return GATES[self.name](logp_MBTV, **vars(self)), None

    def idle_budget(self, kl_BTK: Tensor, epsilon_BTK: Tensor, why: Explanation) -> tuple[Tensor, Tensor]:
        """A gate hears all of the most divergent expert, and less of the others than Eq. 2 does."""
        return loudest_alone(kl_BTK, epsilon_BTK)


@dataclass(frozen=True)
class Owner(Gate):
    name = "owner"

    def idle_budget(self, kl_BTK: Tensor, epsilon_BTK: Tensor, why: Explanation) -> tuple[Tensor, Tensor]:
        """Nobody else is heard."""
        return kl_BTK.argmax(-1) + 1, torch.zeros_like(kl_BTK[..., 0])


@dataclass(frozen=True)
class RelativeGate(Gate):
    share: float = 0.01
    name = "relative-gate"


@dataclass(frozen=True)
class TailFloor(Gate):
    floor: float = 1e-3
    name = "tail-floor"


@dataclass(frozen=True)
class Plausibility(Gate):
    share: float = 0.1
    name = "plausibility"
