"""Does a sample have the law that it should? Pearson's test."""

import math

import torch


def chi_square_p_value(count_V: torch.Tensor, p_V: torch.Tensor) -> float:
    """Pearson's goodness of fit, rare tokens pooled; the Wilson-Hilferty approximation of the tail."""
    expected_V = p_V * count_V.sum()
    common = expected_V >= 10
    seen = torch.cat([count_V[common], count_V[~common].sum()[None]])
    expected = torch.cat([expected_V[common], expected_V[~common].sum()[None]]).clamp_min(1e-9)
    statistic, freedom = ((seen - expected) ** 2 / expected).sum().item(), int(common.sum())
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return 0.5 * math.erfc(z / math.sqrt(2))
