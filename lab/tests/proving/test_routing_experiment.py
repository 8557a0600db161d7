"""The routing experiment on a small ground: it runs by one call, goes on, and says what the library says."""

import json

import pytest
import torch

import tessellm
from tessellm_lab.proving.columns import DESCRIPTION, NOTHING, OURS, Subject, own_columns
from tessellm_lab.proving.experiment import Plan, measure
from tessellm_lab.proving.ground import Ground
from tessellm_lab.proving.ours import decide, decision_of
from tessellm_lab.proving.skills import Places, skill_prompts

from proving_cases import NAMES, small_places

PLAN = Plan(3, counts=(1, 2), expert_data=2, sets=((2, 2),), likelihood=1, completion=2, names=NAMES, calibration=48)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    return small_places(tmp_path_factory.mktemp("ground"))


@pytest.fixture(scope="module")
def ground(places: Places) -> Ground:
    return Ground(places, NAMES, log=lambda text: None)


def test_a_run_fills_the_table_and_a_second_one_reads_nothing(places: Places, tmp_path) -> None:
    said: list[str] = []
    first = measure(places, PLAN, 0, tmp_path, "cpu", said.append)
    assert any("prompts read" in line for line in said)
    again: list[str] = []
    second = measure(places, PLAN, 0, tmp_path, "cpu", again.append)
    assert not any("prompts read" in line for line in again)
    assert json.dumps(first.tables) == json.dumps(second.tables)
    table = first.tables["twenty"]
    families = {entry["family"] for entry in table.values()}
    assert families == {
        OURS,
        "semantic-router",
        "MiniLM centroids",
        "LoGo",
        "SpectR",
        "Arrow",
        "SEQR",
        "prompt likelihood",
    }
    for entry in table.values():
        assert entry["cells"]["plain"]["share"] >= 0.95
        assert {"seen", "unseen", "near", "plain"} <= entry["cells"].keys()
    assert table[f"{OURS}: {NOTHING}"]["cells"]["seen"]["of"] == 3 * len(NAMES)
    assert first.tables["sets"]["2"][f"{OURS}: {NOTHING}"]["seen"]["of"] == 2
    assert first.write(tmp_path)["claims"]


def test_decisions_are_those_of_a_composition(ground: Ground, places: Places, tmp_path) -> None:
    experts = {
        name: {"source": str(places.adapter(name)), "description": places.descriptions()[name]} for name in NAMES
    }
    model = tessellm.compose(places.base, experts, dtype="float32")
    asked = skill_prompts(places, NAMES, 3)
    routes = model.route([each.text for each in asked])
    subject = Subject.of(ground, ground.readings(tmp_path), asked, places, 0)
    column = next(c for c in own_columns(subject) if c.name == f"{OURS}: {DESCRIPTION}, token vectors")
    found = column.decide()
    assert [d.chosen for d in found] == [decision_of(route).chosen for route in routes]
    scores = torch.tensor([[d.score, decision_of(route).score] for d, route in zip(found, routes, strict=True)])
    assert torch.allclose(scores[:, 0], scores[:, 1], atol=0.05)  # energies are kept in half precision


def test_a_subset_is_routed_as_if_there_were_no_other_experts(ground: Ground, places: Places, tmp_path) -> None:
    asked = skill_prompts(places, NAMES, 2)
    subject = Subject.of(ground, ground.readings(tmp_path), asked, places, 0)
    column = next(own_columns(subject, NAMES[1:]))
    alone = Ground(places, NAMES[1:], log=lambda text: None)
    theirs = decide(alone.router, alone.readings(tmp_path).of(alone.rows(asked)), range(2))
    ours = column.decide()
    assert [d.chosen for d in ours] == [d.chosen for d in theirs]
    assert torch.allclose(torch.tensor([d.score for d in ours]), torch.tensor([d.score for d in theirs]), atol=0.05)
