"""How often the composition will be right, predicted from traces alone: no answers are needed.

A greedy text is right if every token is. A token's chance is the lesser of the composition's own confidence in it and
its support: how confident the experts that have a claim there (active, and trusted where the rule tells whom it trusts)
are of that token, on average, weighted by their divergence from the base; the base's confidence where nobody has one.
Where experts blend compatible features their own favourites differ from the blend, and the composition's confidence
counts alone. Greedy decoding takes the favourite, so confidence is sharpened: p³ against the five likeliest p³.

Under a mixture the claim is the posterior: real experts are active on nearly every token, so that activity tells
nothing.

Frozen before it was evaluated, but for mixtures; docs/diagnose.md says how well it does. Shapes: R rows, B texts, N:
members and the composition, K experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .interference import FAR, LARGE, Rows
from .row_statistics import ACTIVE

SHARPNESS = 3.0
LEAST = 1e-9


def chance_right(rows: Rows) -> Tensor:
    """Of every text: [B]."""
    return together(rows, _chance(rows))


def chance_per_token(rows: Rows) -> Tensor:
    """Of every text, the geometric mean over its tokens: [B]. Texts of other lengths can be compared by it."""
    chance_R = _chance(rows)
    return together(rows, chance_R) ** (1 / rows.sums(torch.ones_like(chance_R)).clamp_min(1))


def _chance(rows: Rows) -> Tensor:
    sure_RN = sharpened(rows["logprob"], rows["top_logprobs"])
    return torch.minimum(support(rows, sure_RN), sure_RN[:, -1])


def chance_apart(rows: Rows) -> Tensor:
    """What the loudest claimant of every token would reach alone, if it were left to speak: [B]."""
    top_RN = sharpened(rows["top_logprobs"][..., 0], rows["top_logprobs"])
    loudest_R1 = rows["divergence"].argmax(1, keepdim=True)
    best_R = torch.where(claims(rows).any(1), top_RN[:, 1:-1].gather(1, loudest_R1)[:, 0], top_RN[:, 0])
    return together(rows, best_R)


def together(rows: Rows, chance_R: Tensor) -> Tensor:
    return rows.sums(chance_R.clamp_min(LEAST).log()).exp()


def sharpened(logprob_RN: Tensor, top_RNC: Tensor) -> Tensor:
    total_RN = (SHARPNESS * top_RNC).logsumexp(-1)
    mine_RN = SHARPNESS * logprob_RN
    return (mine_RN - torch.maximum(total_RN, mine_RN)).exp()


def claims(rows: Rows) -> Tensor:
    """Experts that are active and, where the rule tells trust, trusted; if none is both, all that are active."""
    active_RK = rows["divergence"] > ACTIVE
    if "trusted" not in rows.columns:
        return active_RK
    trusted_RK = active_RK & rows["trusted"][:, 1:]
    return torch.where(trusted_RK.any(1, keepdim=True), trusted_RK, active_RK)


def support(rows: Rows, sure_RN: Tensor) -> Tensor:
    if "law" in rows.columns:
        posterior_RL = rows["law"]
        return (posterior_RL[:, :-1] * sure_RN[:, :-1]).sum(1) + posterior_RL[
            :, -1
        ]  # Eq. 2's own confidence counts alone
    claim_RK = claims(rows)
    weight_RK = rows["divergence"] * claim_RK
    theirs_R = (sure_RN[:, 1:-1] * weight_RK).sum(1) / weight_RK.sum(1).clamp_min(LEAST)
    support_R = torch.where(claim_RK.any(1), theirs_R, sure_RN[:, 0])
    return torch.where(blends(rows, claim_RK), 1.0, support_R)


def blends(rows: Rows, claim_RK: Tensor) -> Tensor:
    """Where two claimants or more are compatible although Eq. 2 is no member's distribution."""
    discord_RKK = (rows["pair_accord"] < 0.5) & claim_RK[:, :, None] & claim_RK[:, None]
    calm_R = (rows["log_z"].abs() <= LARGE) & ~discord_RKK.flatten(1).any(1)
    return calm_R & (rows["clash"] > FAR) & (rows["gap"] > FAR) & (claim_RK.sum(1) > 1)
