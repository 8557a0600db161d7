"""How two measurements of the same things go together: Pearson and Spearman, with a bootstrap interval."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

RESAMPLES = 2000


def correlation(first: Sequence[float], second: Sequence[float], seed: int = 0) -> dict[str, float]:
    """Pearson with its 95 % interval over pairs drawn anew, and Spearman with its own."""
    pairs = torch.tensor([list(first), list(second)], dtype=torch.float64)
    drawn = torch.randint(pairs.shape[1], (RESAMPLES, pairs.shape[1]), generator=torch.Generator().manual_seed(seed))
    low, high = _interval(_pearson(pairs[:, drawn]))
    ranked = [_pearson(ranks(pairs[:, part])) for part in drawn.split(100)]
    rank_low, rank_high = _interval(torch.cat(ranked))
    return {
        "pearson": _pearson(pairs).item(), "low": low, "high": high, "spearman": spearman(first, second),
        "spearman_low": rank_low, "spearman_high": rank_high,
    }  # fmt: skip


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """The rank correlation, ties included; 0 where one of the two is constant."""
    pair_2N = ranks(torch.tensor([list(first), list(second)], dtype=torch.float64))
    pair_2N = pair_2N - pair_2N.mean(1, keepdim=True)
    size = pair_2N.norm(dim=1).prod()
    return float(pair_2N.prod(0).sum() / size) if size > 0 else 0.0


def ranks(values: Tensor) -> Tensor:
    """Ranks from 0 along the last axis; equal values share their mean rank."""
    below = (values[..., :, None] > values[..., None, :]).sum(-1)
    equal = (values[..., :, None] == values[..., None, :]).sum(-1)
    return below + (equal - 1).double() / 2


def _pearson(pairs: Tensor) -> Tensor:
    """Over the last axis of [2, …, N]; NaN where one of the two does not vary."""
    centred = pairs - pairs.mean(-1, keepdim=True)
    first, second = centred
    return (first * second).sum(-1) / (first.square().sum(-1) * second.square().sum(-1)).sqrt()


def _interval(values: Tensor) -> tuple[float, float]:
    kept = values[values.isfinite()]
    if not len(kept):
        return float("nan"), float("nan")
    low, high = kept.quantile(torch.tensor([0.025, 0.975], dtype=kept.dtype)).tolist()
    return low, high
