"""Eq. 2, alone and over weighted experts: pure functions of log-probabilities. Knows no rule objects."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

LARGEST_WEIGHT = 1e6  # float32 log-probabilities times more than this overflow
LOG_FLOOR = -1e4  # how a ratio reads log 0 in its denominator; the paper's own clamp
IMPOSSIBLE = -5e3  # a combined token below this was impossible for a speaking member


def product(logp_MBV: Tensor, weights_K: Sequence[float] | Tensor | None = None) -> Tensor:
    """Eq. 2 with weights: log p̂ = log p_b + Σ_i w_i (log p_i − log p_b) − log Z (arXiv 2605.28304).

    Any dimensions may stand between the members (first) and the vocabulary (last). The result is normalised, in
    float32 at least. All weights 1 is the paper's rule; one expert with weight 1 is that expert; a negative weight
    is an anti-expert. Weights are used as they are, never divided by their sum.

    Zeros are defined: a token is impossible where a member that counts positively gives it probability 0. Where
    only a negatively counted member does, its log 0 is read as −10⁴, so the token outranks the others. A member
    that counts zero has no say. If nothing is possible, the members contradict each other, and the base speaks.
    """
    return normalise(product_scores(logp_MBV, weights_K), fallback=logp_MBV[0])


def product_scores(logp_MBV: Tensor, weights_K: Sequence[float] | Tensor | None = None) -> Tensor:
    """Eq. 2 before it is normalised. The log of its sum over the vocabulary is log Z, the interference."""
    count_M = member_counts(weights_K, logp_MBV)
    floor_M = torch.where(count_M > 0, -torch.inf, LOG_FLOOR)  # a positive member may say "impossible", others not
    floored_MBV = torch.maximum(logp_MBV.to(count_M.dtype), floor_M.view(-1, *[1] * (logp_MBV.ndim - 1)))
    return total(count_M, floored_MBV)


def member_counts(weights_K: Sequence[float] | Tensor | None, logp_MBV: Tensor) -> Tensor:
    """How often each member counts in the sum of log-probabilities: 1 − Σ w for the base, w_i for expert i."""
    experts = logp_MBV.shape[0] - 1
    if experts < 1:
        raise ValueError("a rule takes the base and at least one expert; it was given one member")
    if weights_K is None:
        weights_K = [1.0] * experts
    weight_K = _on_device(weights_K, logp_MBV)
    if weight_K.shape != (experts,):
        raise ValueError(f"expected {experts} weights, one an expert; got shape {tuple(weight_K.shape)}")
    return torch.cat([1 - weight_K.sum(0, keepdim=True), weight_K])


def _on_device(weights_K: Sequence[float] | Tensor, like: Tensor) -> Tensor:
    """Weights where the log-probabilities are. Not copied there from the host, which a CUDA graph does not allow."""
    dtype = working_dtype(like)
    if isinstance(weights_K, Tensor):
        return weights_K.to(like.device, dtype)
    return torch.cat([like.new_zeros(0, dtype=dtype), *(like.new_full((1,), w, dtype=dtype) for w in weights_K)])


def normalise(score_BV: Tensor, fallback: Tensor) -> Tensor:
    """Log-softmax; rows in which nothing is possible become the fallback."""
    impossible_B1 = score_BV.amax(-1, keepdim=True) == -torch.inf
    if always(~impossible_B1):
        return score_BV.log_softmax(-1)
    return torch.where(impossible_B1, fallback.to(score_BV.dtype), score_BV).log_softmax(-1)


def tilt(logp_MBV: Tensor, weights_K: Sequence[float] | Tensor) -> Tensor:
    """Put p_i^(w) ∝ p_b^(1−w_i) p_i^(w_i) in the place of every expert: what a weight means to every other rule."""
    base_BV, *experts = logp_MBV.to(working_dtype(logp_MBV))
    weights: list[float | Tensor] = [*(weights_K.unbind() if isinstance(weights_K, Tensor) else weights_K)]
    return torch.stack([base_BV, *(_tilted(base_BV, p, w) for p, w in zip(experts, weights, strict=True))])


def _tilted(base_BV: Tensor, logp_BV: Tensor, weight: float | Tensor) -> Tensor:
    if isinstance(weight, Tensor):  # gradients follow it
        return product(torch.stack([base_BV, logp_BV]), weight[None])
    if weight in (0, 1):
        return logp_BV if weight else base_BV
    return product(torch.stack([base_BV, logp_BV]), [weight])


def working_dtype(logp: Tensor) -> torch.dtype:
    """Half precision is never enough to combine log-probabilities."""
    return torch.promote_types(logp.dtype, torch.float32)


def normalised(logits_M: Sequence[Tensor] | Tensor) -> Tensor:
    """The members' log-probabilities, stacked, in a precision that is enough to combine them."""
    if isinstance(logits_M, Tensor):
        return logits_M.to(working_dtype(logits_M)).log_softmax(-1)
    wide_M = [logits.to(working_dtype(logits)) for logits in logits_M]
    if sums_are_fast(wide_M[0]) or torch.is_grad_enabled() or len({wide.dtype for wide in wide_M}) > 1:
        return torch.stack([wide.log_softmax(-1) for wide in wide_M])
    logp_MBV = wide_M[0].new_empty(len(wide_M), *wide_M[0].shape)
    for wide, logp_BV in zip(wide_M, logp_MBV, strict=True):
        torch.log_softmax(wide, -1, out=logp_BV)  # each where it belongs: stacking would copy them
    return logp_MBV


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
