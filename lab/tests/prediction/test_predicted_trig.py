"""Trig provers in the prediction: which problems they are asked, how strong they are, and a run from file to claims."""

import random

import pytest
import torch

from tessellm_lab.common.stacked import initialise, select, to_llama
from tessellm_lab.prediction import experiment, trig
from tessellm_lab.trig import trained
from tessellm_lab.trig.members import MEMBERS, SHAPE, save
from tessellm_lab.trig.problems import NAMES


@pytest.fixture(scope="module")
def members():
    made = initialise(SHAPE, len(MEMBERS), torch.Generator().manual_seed(0))
    return {name: p.bfloat16().float() for name, p in made.items()}


def test_problems_need_what_the_experts_know_and_one_kind_does_not():
    asked = trig.groups(NAMES[:2], 6, random.Random(0))
    assert {needs: {proof.needs for proof in group} for needs, group in asked.items()} == {
        1: {frozenset([NAMES[0]]), frozenset([NAMES[1]])},
        2: {frozenset(NAMES[:2])},
        0: {frozenset([NAMES[2]])},
    }
    assert sorted(trig.groups(NAMES, 1, random.Random(0))) == [1, 2, 3]


def test_strength_is_the_way_from_the_base(members):
    def weights(model):
        return torch.cat([p.flatten() for p in model.parameters()])

    base, expert = (weights(to_llama(members, SHAPE, number)) for number in (0, 2))
    found = trig.provers(members, 0.5, "cpu")
    torch.testing.assert_close(weights(found[NAMES[1]]), (base + expert) / 2)
    torch.testing.assert_close(weights(found["base"]), base)
    torch.testing.assert_close(weights(trig.provers(members, 1.0, "cpu")[NAMES[1]]), expert)


def test_from_a_file_to_claims(members, tmp_path, monkeypatch):
    save(select(members, [0] * len(MEMBERS)), tmp_path / "members", {"seed": 0})
    monkeypatch.setattr(trig, "KEPT", tmp_path / "members")
    monkeypatch.setattr(trig, "QUICK", trig.Plan((1.0,), (("evidence", 1.0),), 1, 1))
    monkeypatch.setattr(trained, "SLACK", -60)  # random members never end
    found = [experiment.row_of(each, 5) for each in trig.judged(5, "cpu", "cpu", lambda text: None)]
    assert [(row["experts"], row["needs"], row["missing"]) for row in found] == [
        (2, 1, False), (2, 2, False), (2, 0, True), (3, 1, False), (3, 2, False), (3, 3, False),
    ]  # fmt: skip
    assert all(0 <= row["predicted"] <= 1 and row["measured"] == 0 for row in found)
    assert all(row["mean KL"] < 1e-6 for row in found)  # every expert is the base
    assert {row["members"] for row in found} == {"trig 5, strength 1, "}
    monkeypatch.setattr(experiment, "RESAMPLES", 5)
    claims = {claim.id: claim.value for claim in experiment.claims_of(found, 5)}
    assert claims["compositions"] == 5
    assert claims["blind"] == [pytest.approx(found[2]["predicted"], abs=1e-4), 0.0]
