"""The prediction experiment: its intervals, and a small run from training to claims."""

import json

import pytest
import torch

from tessellm_lab.common.stacked import Shape
from tessellm_lab.prediction import experiment, letters, skills, trig
from tessellm_lab.skills import chains
from tessellm_lab.skills.members import Recipe


def test_the_interval_resamples_groups():
    rows = [{"members": f"{n // 10}", "predicted": n / 100, "measured": n / 100} for n in range(100)]
    assert experiment.interval(rows, "predicted", 0) == pytest.approx((1, 1))
    noise = torch.rand(100, generator=torch.Generator().manual_seed(1)).tolist()
    mixed = [row | {"measured": value} for row, value in zip(rows, noise, strict=True)]
    low, high = experiment.interval(mixed, "predicted", 0)
    assert low < 0 < high


def test_from_training_to_claims(tmp_path, monkeypatch):
    monkeypatch.setattr(letters, "QUICK", letters.Plan((5, 15), (2, 4), (8,), (1.0,), 8, 20))
    small = Recipe(
        Shape(chains.VOCABULARY, 32, 1, 2), regimes=("aligned", "narrow"), skills=(1, 4), steps=1, base_updates=30,
        base_rows=8, base_rate=3e-3, expert_rows=8, expert_rate=2e-3,
    )  # fmt: skip
    monkeypatch.setattr(skills, "QUICK", skills.Plan(small, (10, 30), (2,), 8, 20))
    monkeypatch.setattr(experiment, "RESAMPLES", 50)
    monkeypatch.setattr(trig, "KEPT", tmp_path / "none")
    said = []
    content = experiment.run(3, tmp_path, "cpu", log=said.append)
    (left_out,) = [text for text in said if "left out" in text]
    assert left_out.startswith(f"trig is left out: expected trained members of trig at {tmp_path / 'none'}, where")
    assert json.loads((tmp_path / "prediction.json").read_text())["seed"] == 3
    assert (tmp_path / "prediction.png").stat().st_size > 10_000
    rows = content["tables"]["compositions"]
    assert len(rows) == 2 * 4 * 2 + 2 * 2 * 2
    assert all(0 <= row["predicted"] <= 1 and 0 <= row["measured"] <= 1 for row in rows)
    assert {row["rule"] for row in rows} == {"product", "evidence"}
    assert {claim["id"] for claim in content["claims"]} >= {"spearman", "interval", "naive", "compositions"}
    assert content["claims"][4]["holds"] is False  # 24 are too few
