"""Statistics that the library and its experiments share: bootstrap intervals over texts."""

from __future__ import annotations

import torch
from torch import Tensor

from .model.rows import slices

AT_ONCE = 4_000_000  # numbers drawn at once


def bootstrap(
    sum_B: Tensor, count_B: Tensor, confidence: float, seed: int, resamples: int = 2000
) -> tuple[float, float]:
    """A percentile interval for Σ sum / Σ count, over texts: tokens of one text are not independent."""
    texts, generator = len(sum_B), torch.Generator().manual_seed(seed)
    means = []
    for start, stop in slices(resamples, texts, AT_ONCE):
        draws_RB = torch.randint(texts, (stop - start, texts), generator=generator)
        means.append(sum_B[draws_RB].sum(1) / count_B[draws_RB].sum(1).clamp_min(1))
    means_R, tail = torch.cat(means), (1 - confidence) / 2
    low, high = means_R.quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return low, high
