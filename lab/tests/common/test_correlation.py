"""Rank correlation, against SciPy's."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import spearmanr

from tessellm_lab.common.correlation import spearman


def test_rank_correlation_is_scipys() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        one, other = torch.randint(6, (2, 30), generator=generator).double().tolist()
        assert spearman(one, other) == pytest.approx(spearmanr(one, other).statistic)


def test_rank_correlation_with_a_constant_is_zero() -> None:
    assert spearman([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]) == 0
