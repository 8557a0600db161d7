"""What is claimed of runs follows from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tessellm_lab.common.correlation import correlation
from tessellm_lab.scale import bent, experiment
from tessellm_lab.scale.encodings import BENT
from tessellm_lab.scale.networks import Mlp

from scale_cases import drawn, toys


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


def test_bent_codes_are_trained_as_long_as_the_others_and_judged_like_them() -> None:
    stack = bent.stack_of("full", 3)
    assert (stack.steps, stack.network) == (300_000, Mlp())
    assert [(run.encoding, run.seed) for run in stack.runs] == [("identity", 3), *((name, 3) for name in BENT)]
    rows = [
        {"encoding": name, "steps": 9, "held_out": {"score": reached}, "decode_input": {"held_out": 0.5}}
        for name, reached in zip(("identity", *BENT), (0.99, 0.95, 0.1), strict=True)
    ]
    claims = bent.claims_of(rows, full=True)
    assert [claim.holds for claim in claims] == [None, True, None, True, None, False]
    assert all(claim.target is None for claim in bent.claims_of(rows, full=False))


def test_the_program_of_bent_codes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bent, "stacks", toys)
    given = ["--out", str(tmp_path), "--size", "cpu"]
    assert bent.main(given) == 0
    found = json.loads((tmp_path / "scale-bent.json").read_text())
    assert [row["encoding"] for row in found["tables"]["runs"]] == ["identity", *BENT]
    assert bent.main([*given[:2], "--size", "full"]) == (0 if torch.cuda.is_available() else 2)


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
