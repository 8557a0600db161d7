"""The laws of a mixture, read row by row: what each says, how sure and how far from the base each expert is, and what
they say together. Pure functions of log-probabilities; knows no belief, no state and no prompt.

Shapes: M members (0 is the base), K experts, L = M+1 laws, B batch, T time, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .equation import LOG_FLOOR, normalise, product_scores
from .rows import last_real
from .styles import apart, in_styles
from .sums import always, own_and_base, probabilities, weighted_sum

TINY = 1e-3  # nats: entropies and divergences below this look alike


class Readings(NamedTuple):
    """What one row says by itself."""

    logp_MBTV: Tensor
    prob_MBTV: Tensor
    equation_BTV: Tensor  # Eq. 2 over all, log
    log_z_BT: Tensor
    averaged_BTKA: Tensor  # H_b − H_i, log H_b − log H_i, log KL(p_i ‖ p_b)
    now_BTKN: Tensor  # −log H_i, √KL(p_i ‖ p_b)

    def laws(self, *at: Any) -> Tensor:
        """The laws' log-probabilities at those places of [B, T, V]: [L, …]."""
        return torch.cat([self.logp_MBTV[:, *at], self.equation_BTV[None][:, *at]])


class Heard(NamedTuple):
    """What rows tell a belief: how each expert acts, and what each law said of the tokens fed."""

    averaged_BTKA: Tensor
    now_BTKN: Tensor
    said_BTL: Tensor  # log-probability
    heard_BT: Tensor  # whether there was a row that predicted the token


def read_rows(logp_MBTV: Tensor) -> Readings:
    """The laws, and how sure and how far from the base each expert is."""
    prob_MBTV, averaged_BTKA, now_BTKN = activity(logp_MBTV)
    score_BTV = product_scores(logp_MBTV)
    equation_BTV = normalise(score_BTV, fallback=logp_MBTV[0])
    log_z_BT = score_BTV.amax(-1) - equation_BTV.amax(-1)
    return Readings(logp_MBTV, prob_MBTV, equation_BTV, log_z_BT, averaged_BTKA, now_BTKN)


def activity(logp_MBTV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The members' probabilities, and the numbers of each expert: those that are averaged, and those of a last row."""
    safe_MBTV = logp_MBTV if always(logp_MBTV.amin(-1) >= LOG_FLOOR) else logp_MBTV.clamp_min(LOG_FLOOR)
    prob_MBTV = probabilities(safe_MBTV)
    return prob_MBTV, *expert_numbers(*own_and_base(prob_MBTV, safe_MBTV))


def expert_numbers(own_MBT: Tensor, base_MBT: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers of each expert, from Σ p_m log p_m and Σ p_m log p_b of every member."""
    entropy_MBT, kl_KBT = -own_MBT, (own_MBT - base_MBT)[1:].clamp_min(0)
    surer_KBT = entropy_MBT[:1] - entropy_MBT[1:]
    relative_MBT = (entropy_MBT + 10 * TINY).log()
    averaged = (surer_KBT, relative_MBT[:1] - relative_MBT[1:], (kl_KBT + TINY).log())
    now = (-(entropy_MBT[1:] + TINY).log(), kl_KBT.sqrt())
    averaged_BTKA, now_BTKN = (torch.stack(numbers, -1).permute(1, 2, 0, 3) for numbers in (averaged, now))
    return averaged_BTKA, now_BTKN


def styled(rows: Readings, logp_MBTV: Tensor, styles: Sequence[int]) -> Readings:
    """The same laws, said in the styles. Numbers stay those of the experts themselves: who should answer is asked
    without the styles."""
    own_MBTV = in_styles(*apart(logp_MBTV, styles))
    score_BTV = product_scores(logp_MBTV)
    equation_BTV, log_z_BT = normalise(score_BTV, fallback=logp_MBTV[0]), score_BTV.logsumexp(-1)
    return Readings(own_MBTV, own_MBTV.exp(), equation_BTV, log_z_BT, rows.averaged_BTKA, rows.now_BTKN)


def mixture(rows: Readings, belief_BTL: Tensor) -> Tensor:
    """The log of Σ belief · p_law, a sum of probabilities. Where that is below all numbers, the base's part of it; NaN
    where a member's law is."""
    member_BTM, equation_BT1 = belief_BTL.exp().split([belief_BTL.shape[-1] - 1, 1], -1)
    prob_BTV = weighted_sum(member_BTM, rows.prob_MBTV) + equation_BT1 * probabilities(rows.equation_BTV)
    tiny = torch.finfo(prob_BTV.dtype).tiny
    if always(prob_BTV.amin(-1) > tiny):
        return prob_BTV.log()
    return torch.where(prob_BTV <= tiny, belief_BTL[..., :1] + rows.logp_MBTV[0], prob_BTV.log())


def observe(
    rows: Readings, tokens_BT: Tensor, mask_BT: Tensor, pending_BLV: Tensor, started_B: Tensor
) -> tuple[Tensor, Tensor]:
    """The laws' log-probability of each token fed, [B, T, L], and whether there was a row that predicted it: one of
    these, or the pending one of before, where the text has started."""
    if tokens_BT.shape[1] == 1:
        said_BL1 = pending_BLV.gather(-1, tokens_BT[:, :, None].expand(-1, pending_BLV.shape[1], 1))
        return said_BL1.transpose(1, 2).clamp_min(LOG_FLOOR), mask_BT & started_B[:, None]
    last_BT = last_real(mask_BT)
    row_B1 = torch.arange(len(tokens_BT), device=tokens_BT.device)[:, None]
    within_BTL = rows.laws(row_B1, last_BT.clamp(0, tokens_BT.shape[1] - 1), tokens_BT).permute(1, 2, 0)
    pending_BTL = pending_BLV[row_B1, :, tokens_BT]
    inside_BT = last_BT >= 0
    said_BTL = torch.where(inside_BT[..., None], within_BTL, pending_BTL)
    return said_BTL.clamp_min(LOG_FLOOR), mask_BT & (inside_BT | started_B[:, None])
