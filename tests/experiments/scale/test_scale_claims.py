"""What is claimed of runs follows from them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tessellm.experiments.lab.correlation import correlation
from tessellm.experiments.scale import experiment

from scale_cases import drawn


def test_the_correlation_leaves_out_runs_that_were_trained_longer() -> None:
    def row(held_out: float, decodable: float, curve: list[Any]) -> dict[str, Any]:
        scores = {"held_out": {"score": held_out}, "decode": {"held_out": decodable}}
        return {"absent": [], "curve": curve, "steps": 30 if curve else 3, **scores}

    short = [row(0.1 * n, 0.2 * n, []) for n in range(5)]
    assert [claim.id for claim in experiment.correlations(short, True)][-1] == "correlation-rank"
    claims = {claim.id: claim for claim in experiment.correlations([*short, row(0.0, 5.0, [[1, 0.0]])], True)}
    assert claims["correlation"].value == 1.0
    assert "5 runs of at most 3 updates" in claims["correlation"].statement
    assert not claims["correlation"].holds  # too few
    assert claims["correlation-all"].value < 0
    assert "over 6 runs" in claims["correlation-all"].statement


def test_correlations_are_known_ones() -> None:
    found = correlation([1, 2, 3, 4, 5, 6], [2, 4, 6, 8, 10, 100])
    assert found["spearman"] == pytest.approx(1)
    assert 0.6 < found["pearson"] < 1
    assert correlation([1, 1, 2, 2], [1, 2, 1, 2])["spearman"] == pytest.approx(0)
    x = torch.randn(200, generator=drawn()).tolist()
    y = [value + noise for value, noise in zip(x, torch.randn(200, generator=drawn(1)).tolist(), strict=True)]
    found = correlation(x, y)
    assert found["low"] < found["pearson"] < found["high"]
    from scipy import stats

    assert found["pearson"] == pytest.approx(stats.pearsonr(x, y)[0])
    assert found["spearman"] == pytest.approx(stats.spearmanr(x, y)[0])
