"""Sums over a whole vocabulary, as is fastest where they are taken: matrix products on a CPU; plain sums on a GPU, and
where a compiler makes one pass of them."""

from __future__ import annotations

import torch
from torch import Tensor

PARTS = 128  # of a vocabulary on a GPU
SUMS_OF = 5  # members; the registers of one pass do not hold the sums of more


def against_base(prob_MBTV: Tensor, safe_MBTV: Tensor) -> tuple[Tensor, Tensor]:
    """Σ p_m log(p_n / p_b), [B, T, M, M], and Σ p_m log p_b, [B, T, M]."""
    if not sums_are_fast(prob_MBTV):
        cross_BTMM = torch.einsum("mbtv,nbtv->btmn", prob_MBTV, safe_MBTV - safe_MBTV[:1])
        return cross_BTMM, torch.einsum("mbtv,btv->btm", prob_MBTV, safe_MBTV[0])
    terms = [safe_MBTV[0], *(safe_BTV - safe_MBTV[0] for safe_BTV in safe_MBTV[1:])]
    if len(terms) > SUMS_OF and torch.compiler.is_compiling():
        sum_MMBT = (prob_MBTV[:, None] * torch.stack(terms)).sum(-1)
    else:
        sums = [parts(prob_BTV * term_BTV).sum(-1) for prob_BTV in prob_MBTV for term_BTV in terms]
        sum_MMBT = torch.stack(sums).sum(-1).unflatten(0, (len(terms), -1))
    sum_BTMM = sum_MMBT.permute(2, 3, 0, 1)
    return torch.nn.functional.pad(sum_BTMM[..., 1:], (1, 0)), sum_BTMM[..., 0]


def own_and_base(prob_MBTV: Tensor, safe_MBTV: Tensor) -> tuple[Tensor, Tensor]:
    """Σ p_m log p_m and Σ p_m log p_b: [M, B, T] each."""
    if not sums_are_fast(prob_MBTV):
        own_MBT = torch.einsum("mbtv,mbtv->mbt", prob_MBTV, safe_MBTV)
        return own_MBT, (prob_MBTV * safe_MBTV[:1]).sum(-1)
    own_MBT, base_MBT = (parts(prob_MBTV * log_MBTV).sum(-1).sum(-1) for log_MBTV in (safe_MBTV, safe_MBTV[:1]))
    return own_MBT, base_MBT


def probabilities(logp_BV: Tensor) -> Tensor:
    """e^(log p) of normalised rows. On a CPU a softmax takes two thirds of the time of the library's exponential, and a
    fifth where much of it underflows."""
    return logp_BV.exp() if sums_are_fast(logp_BV) else logp_BV.softmax(-1)


def parts(x_BTV: Tensor, fill: float = 0.0) -> Tensor:
    """A vocabulary in pieces, as many as keep a GPU busy: each is summed in one pass, and their sums in another."""
    padded = torch.nn.functional.pad(x_BTV, (0, -x_BTV.shape[-1] % PARTS), value=fill)
    return padded.unflatten(-1, (PARTS, -1))


def weighted_sum(count_BTM: Tensor, x_MBTV: Tensor) -> Tensor:
    """Σ_m count_m x_m of log-probabilities or probabilities: [B, T, V]."""
    if not sums_are_fast(x_MBTV):
        return torch.einsum("btm,mbtv->btv", count_BTM, x_MBTV)
    return (count_BTM.permute(2, 0, 1)[..., None] * x_MBTV).sum(0)


def total(count_M: Tensor, x_MBV: Tensor) -> Tensor:
    """Σ_m count_m x_m, the same counts everywhere: [B, V], or whatever dimensions stand behind the members."""
    if not sums_are_fast(x_MBV):
        return torch.tensordot(count_M, x_MBV, dims=1)
    return (count_M.view(-1, *[1] * (x_MBV.ndim - 1)) * x_MBV).sum(0)


def always(is_so: Tensor) -> bool:
    """Whether something is so everywhere, where that can be asked: on a CPU, and not while a compiler reads along.
    Saves passes over a whole vocabulary that would change nothing."""
    return not sums_are_fast(is_so) and bool(is_so.all())


def sums_are_fast(like: Tensor) -> bool:
    """A compiler makes one pass of many sums; and a product of a few rows by a few, over a whole vocabulary, is one
    that a GPU's library gives to a handful of its processors."""
    return torch.compiler.is_compiling() or like.device.type != "cpu"
