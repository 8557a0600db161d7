"""What the library and its experiments share: a bootstrap in portions, and rank correlation against SciPy's."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import spearmanr

from tessellm import statistics


def drawn() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_a_bootstrap_in_portions_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = drawn()
    sum_B = torch.rand(70, generator=generator, dtype=torch.float64)
    count_B = torch.randint(1, 9, (70,), generator=generator).double()
    whole = statistics.bootstrap(sum_B, count_B, 0.95, seed=5, resamples=500)
    monkeypatch.setattr(statistics, "AT_ONCE", 300)  # four of 500 draws at once
    assert statistics.bootstrap(sum_B, count_B, 0.95, seed=5, resamples=500) == whole
    assert whole[0] < sum_B.sum() / count_B.sum() < whole[1]


def test_rank_correlation_is_scipys() -> None:
    generator = drawn()
    for _ in range(20):
        one, other = torch.randint(6, (2, 30), generator=generator).double().tolist()
        assert statistics.spearman(one, other) == pytest.approx(spearmanr(one, other).statistic)


def test_rank_correlation_with_a_constant_is_zero() -> None:
    assert statistics.spearman([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]) == 0
