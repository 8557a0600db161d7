"""What the library and its experiments share: a bootstrap in portions."""

from __future__ import annotations

import pytest
import torch

from tessellm import statistics


def test_a_bootstrap_in_portions_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    sum_B = torch.rand(70, generator=generator, dtype=torch.float64)
    count_B = torch.randint(1, 9, (70,), generator=generator).double()
    whole = statistics.bootstrap(sum_B, count_B, 0.95, seed=5, resamples=500)
    monkeypatch.setattr(statistics, "AT_ONCE", 300)  # four of 500 draws at once
    assert statistics.bootstrap(sum_B, count_B, 0.95, seed=5, resamples=500) == whole
    assert whole[0] < sum_B.sum() / count_B.sum() < whole[1]
