"""`theorems` end to end on few families: claims hold, files are written, the bound is drawn above the gap."""

import json

import torch

from tessellm_lab.theorems import experiment as theorems


def test_theorems_hold_on_a_few_families(tmp_path, monkeypatch):
    monkeypatch.setitem(theorems.FAMILIES, "cpu", 15)
    monkeypatch.setattr(theorems, "EPSILONS", (0.03, 0.1))
    monkeypatch.setattr(theorems, "EXPERTS", (2, 4))
    result = theorems.run(seed=0, out=tmp_path, size="cpu")
    assert result.holds
    written = json.loads((tmp_path / "theorems.json").read_text())
    assert {claim["id"] for claim in written["claims"]} >= {"theorem-1", "theorem-2", "lemma-1", "gap-particles"}
    assert (tmp_path / result.figures[0]).stat().st_size > 10_000
    for row in result.tables["gap against ε and k"]:
        assert row["gap"] <= row["total_variation"] + 1e-12 <= row["bound"]


def test_seeds_change_families_and_nothing_else():
    first, again, other = (
        [claim.value for claim in theorems.exact_claims(3, torch.Generator().manual_seed(seed))] for seed in (0, 0, 1)
    )
    assert first == again != other
