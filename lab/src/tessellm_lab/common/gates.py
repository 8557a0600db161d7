"""Rules without state: Eq. 2 with less of its tail noise. Pure functions of log-probabilities, kept for comparison.

Eq. 2 divides by the base once an expert, so k idle experts add up k errors in the tail, where nobody meant anything.
Each rule here lets the most divergent expert speak in full and listens less to the others. Each is a conservative
extension of Eq. 2: where at most one expert differs from the base, that one is the most divergent, the others say
what the base says, and leaving their ratios out, or zero, changes nothing.

Shapes: M members (0 is the base), K experts; any dimensions between the members and the vocabulary V.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tessellm.rules.equation import IMPOSSIBLE, LOG_FLOOR


def divergence(logp_MBV: Tensor) -> Tensor:
    """KL(p_i ‖ p_b) of every expert: [K, B]."""
    safe_MBV = logp_MBV.clamp_min(LOG_FLOOR)
    return (logp_MBV[1:].exp() * (safe_MBV[1:] - safe_MBV[:1])).sum(-1)


def is_largest(divergence_KB: Tensor) -> Tensor:
    """True for the most divergent expert, the first of equals: [K, B]."""
    index_K = torch.arange(divergence_KB.shape[0], device=divergence_KB.device)
    return index_K.view(-1, *[1] * (divergence_KB.dim() - 1)) == divergence_KB.argmax(0)


def add_ratios(logp_MBV: Tensor, ratio_KBV: Tensor) -> Tensor:
    """log p_b + Σ ratios, normalised."""
    logp_BV = (logp_MBV[0].clamp_min(LOG_FLOOR) + ratio_KBV.sum(0)).log_softmax(-1)
    return logp_BV.masked_fill(logp_BV < IMPOSSIBLE, -torch.inf)


def ratios(logp_MBV: Tensor) -> Tensor:
    """log p_i − log p_b: [K, B, V], finite."""
    safe_MBV = logp_MBV.clamp_min(LOG_FLOOR)
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
