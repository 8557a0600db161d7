"""What one row of log-probabilities says by itself: who differs from whom, who claims it, and Eq. 2 over the claimants.

Pure functions of log-probabilities, for rules that weigh their members. Knows no tokens and no rows before.

Shapes: M members (0 is the base), B batch, T time, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tessellm.rules.equation import IMPOSSIBLE, LOG_FLOOR

CLAIM = 0.01  # the most divergent expert claims a step, and others that diverge by more than this (nats)
BASE_FIRST = 0.5  # the base is the centre unless another member resembles more members, by this much


class Claims(NamedTuple):
    """What one row of log-probabilities says by itself."""

    centre_BT: Tensor
    support_BT: Tensor
    divergence_BTM: Tensor
    novelty_BTM: Tensor
    entropy_BTM: Tensor
    claim_BTM: Tensor
    contested_BT: Tensor
    blend_BTV: Tensor
    log_z_BT: Tensor


def read_claims(logp_MBTV: Tensor) -> Claims:
    """Pairwise divergences, the centre, the claimants, and Eq. 2 over them."""
    members = logp_MBTV.shape[0]
    safe_MBTV = logp_MBTV.clamp_min(LOG_FLOOR)
    prob_MBTV = logp_MBTV.exp()
    cross_BTMM = torch.einsum("mbtv,nbtv->btmn", prob_MBTV, safe_MBTV - safe_MBTV[:1])  # Σ p_m log(p_n / p_b)
    base_BTM = torch.einsum("mbtv,btv->btm", prob_MBTV, safe_MBTV[0])
    own_BTM = cross_BTMM.diagonal(dim1=-2, dim2=-1)
    kl_BTMM = (own_BTM[..., None] - cross_BTMM).clamp_min(0)  # KL(p_m ‖ p_n)
    entropy_BTM = -(own_BTM + base_BTM)

    index_M = torch.arange(members, device=logp_MBTV.device)
    alike_BTM = (-(kl_BTMM + kl_BTMM.mT) / 2).exp().sum(-1)
    centre_BT = (alike_BTM + BASE_FIRST * (index_M == 0)).argmax(-1)
    is_centre_BTM = centre_BT[..., None] == index_M
    support_BT = (alike_BTM * is_centre_BTM).sum(-1)
    divergence_BTM = (kl_BTMM * is_centre_BTM[..., None, :]).sum(-1) * (index_M > 0)
    loudest_BT1 = divergence_BTM[..., 1:].argmax(-1, keepdim=True) + 1
    claim_BTM = (divergence_BTM > CLAIM) | (index_M == loudest_BT1)
    contested_BT = claim_BTM.sum(-1) > 1

    lost_BT11 = (centre_BT > 0)[..., None, None]  # a lost base is nobody to be compared with
    ignored_BTMM = (index_M[:, None] == index_M) | (lost_BT11 & (index_M == 0))
    nearest_BTM = kl_BTMM.masked_fill(ignored_BTMM, torch.inf).amin(-1)
    novelty_BTM = torch.where(nearest_BTM.isinf(), divergence_BTM, nearest_BTM)

    count_BTM = claim_BTM + (1 - claim_BTM.sum(-1, keepdim=True)) * is_centre_BTM  # Eq. 2 about the centre
    score_BTV = torch.einsum("btm,mbtv->btv", count_BTM.to(logp_MBTV.dtype), safe_MBTV)
    log_z_BT = score_BTV.logsumexp(-1)
    blend_BTV = score_BTV - log_z_BT[..., None]
    blend_BTV = blend_BTV.masked_fill(blend_BTV < IMPOSSIBLE, -torch.inf)
    return Claims(
        centre_BT, support_BT, divergence_BTM, novelty_BTM, entropy_BTM, claim_BTM, contested_BT, blend_BTV, log_z_BT
    )
