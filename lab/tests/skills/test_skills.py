"""The experiments run end to end at a toy size, and their yardsticks measure what they say."""

import dataclasses
import json

import pytest
import torch

from tessellm_lab.common.intervals import share
from tessellm_lab.common.stacked import Shape
from tessellm_lab.letters import many_experts
from tessellm_lab.skills import baselines, chains, endings
from tessellm_lab.skills import experiment as skills
from tessellm_lab.skills import members as skill_members


@pytest.fixture
def toy(monkeypatch):
    recipe = skill_members.Recipe(
        Shape(chains.VOCABULARY, 16, 1, 2), regimes=("aligned", "aware"), skills=(1, 4), steps=2,
        base_updates=2, base_rows=2, expert_updates=2, expert_rows=2,
    )  # fmt: skip
    monkeypatch.setattr(skills, "recipes", lambda size: {"toy": recipe})


@pytest.mark.usefixtures("toy")
def test_skills_writes_its_claims_and_figure(tmp_path):
    content = skills.run(0, tmp_path, "cpu", log=lambda text: None)
    assert json.loads((tmp_path / "skills.json").read_text()) == json.loads(json.dumps(content))
    assert (tmp_path / "skills.png").exists()
    assert {cell["chain"] for cell in content["tables"]["toy"]} == {1, 2}
    assert all(claim["holds"] is None for claim in content["claims"])


def test_many_experts_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(many_experts, "STRINGS", 4)
    monkeypatch.setattr(many_experts, "LENGTHS", (8, 16, 31))
    monkeypatch.setattr(many_experts, "SCHEDULE", dataclasses.replace(many_experts.SCHEDULE, epochs=1, rows=2))
    content = many_experts.run(0, tmp_path, "cpu", log=lambda text: None)
    assert len(content["tables"]["letters"]) == 13 * 3
    assert (tmp_path / "many-experts.png").exists()


def test_endings_runs(tmp_path, monkeypatch):
    toy = endings.Size(Shape(endings.VOCABULARY, 16, 1, 2), 2, 2, 2, 2, 1e-3, 4)
    monkeypatch.setitem(endings.SIZES, "cpu", toy)
    content = endings.run(0, tmp_path, "cpu", log=lambda text: None)
    assert {cell["case"] for cell in content["tables"]["endings"]} == set(endings.SUITE)


def gold_members(chain: int) -> tuple[torch.Tensor, chains.Prompts]:
    """A base that always says letter 0, and experts that know the gold token exactly where they own it."""
    prompts = chains.sample_test(2, chain, 20, torch.Generator().manual_seed(3))
    next_token = prompts.tokens_BT.roll(-1, 1)
    rows = torch.zeros(3, 20, prompts.tokens_BT.shape[1], chains.VOCABULARY)
    rows[..., 0] = 5.0
    for member in range(3):
        mine = (prompts.owner_BT.roll(-1, 1) == member)[..., None]
        rows[member] += 20 * mine * torch.nn.functional.one_hot(next_token, chains.VOCABULARY)
    return rows.log_softmax(-1), prompts


def test_the_oracle_is_right_and_a_wrong_speaker_is_caught():
    rows, prompts = gold_members(2)
    assert not skill_members.wrong(skill_members.oracle(rows, prompts), prompts).any()
    errors = skill_members.wrong(rows[0], prompts)
    assert errors.any(1).all()
    kinds = skill_members.first_errors(errors, prompts)
    assert sum(kinds.values()) == 20
    assert kinds["stop"] == kinds["marker"] == 0


def test_merging_formulas_on_small_numbers():
    base, first, second = torch.zeros(4), torch.tensor([1.0, -2.0, 0.1, 0.0]), torch.tensor([3.0, 1.0, 0.0, -0.1])
    stacked = torch.stack([base, first, second])
    none = torch.Generator()
    torch.testing.assert_close(baselines.task_arithmetic(stacked, 0.5, none), (first + second) / 2)
    # half of the entries kept: [1, −2], [3, 1]; signs +, −; means of those that agree
    torch.testing.assert_close(baselines.ties(stacked, 1.0, none, density=0.5), torch.tensor([2.0, -2.0, 0.0, 0.0]))
    torch.testing.assert_close(baselines.dare(stacked, 1.0, none, density=1.0), first + second)


def test_merging_one_expert_is_that_expert():
    params = {"weight": torch.randn(2, 3, 3, generator=torch.Generator().manual_seed(0))}
    merged = baselines.merge("task-arithmetic", params, 1.0)
    torch.testing.assert_close(merged["weight"], params["weight"][1:])


def test_wilson_interval():
    cell = share(8, 10)
    assert cell["share"] == 0.8
    assert (round(cell["low"], 3), round(cell["high"], 3)) == (0.490, 0.943)
