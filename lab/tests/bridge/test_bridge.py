"""Combinations held out are held out, compute is equal, and both roads are judged by the same texts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from tessellm.errors import CheckpointError
from tessellm_lab.bridge import experiment
from tessellm_lab.bridge.combinations import ChainTable, combinations, gold, split
from tessellm_lab.bridge.knowledge import ROWS, decode_all, due_skill, read
from tessellm_lab.bridge.state import State
from tessellm_lab.common.finite import TrainingError
from tessellm_lab.common.stacked import Shape, initialise, to_llama
from tessellm_lab.probe.activations import text_features
from tessellm_lab.skills import chains
from tessellm_lab.skills.members import oracle, wrong

SKILLS = (1, 2, 4, 6)


def drawn(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_combinations_are_ordered_and_nothing_follows_itself() -> None:
    assert len(combinations(SKILLS, 2)) == 12
    assert len(combinations(chains.ALL_SKILLS, 3)) == 8 * 7 * 7
    parts = split(SKILLS, 3, 0.25, 0)
    assert not set(parts.held_out) & set(parts.trainable)
    assert len(parts.held_out) + len(parts.trainable) == 12 + 36
    assert parts.seen(0.0) == []
    assert set(parts.seen(0.25)) < set(parts.seen(0.5)) < set(parts.seen(0.75))
    assert {len(chain) for chain in parts.held_out} == {2, 3}


def test_models_train_on_their_share_alone_and_on_right_answers() -> None:
    parts = split(SKILLS, 2, 0.25, 0)
    seen = [parts.seen(0.0), parts.seen(0.5)]
    table = ChainTable(seen, SKILLS, 2, "cpu")
    inputs, targets, mask = table.batch(300, drawn())
    for model, allowed in enumerate(seen):
        found = set()
        for row in inputs[model].tolist():
            length = row.index(chains.COLON)
            found.add(tuple(token - chains.FIRST_INSTRUCTION for token in row[:length]))
        assert {chain for chain in found if len(set(chain)) > 1} == set(allowed)
        assert {chain for chain in found if len(set(chain)) == 1} == {(s,) * n for s in SKILLS for n in (1, 2)}
    row, chain_length = inputs[1, 0].tolist(), inputs[1, 0].tolist().index(chains.COLON)
    text = torch.tensor(row[chain_length + 1 : chain_length + 7])
    first = chains.transforms(text)[row[0] - chains.FIRST_INSTRUCTION].tolist()
    assert row[chain_length + 8 : chain_length + 14] == first
    assert targets[1, 0, chain_length + 6] == chains.MARKER
    assert mask[1, 0, chain_length + 6] == 1
    assert mask[1, 0, : chain_length + 5].sum() == 0


def test_gold_texts_are_the_chains_asked_for_and_have_owners() -> None:
    chosen = [(1, 4), (6, 2)]
    prompts = gold(chosen, SKILLS, 6, drawn())
    for number, row in enumerate(prompts.tokens_BT.tolist()):
        skills = chosen[number % 2]
        assert [token - chains.FIRST_INSTRUCTION for token in row[:2]] == list(skills)
        text = torch.tensor(row[3:9])
        for step, skill in enumerate(skills):
            text = chains.transforms(text)[skill]
            assert row[10 + 7 * step : 16 + 7 * step] == text.tolist()
            owners = prompts.owner_BT[number, 10 + 7 * step : 16 + 7 * step].tolist()
            assert owners == [1 + SKILLS.index(skill)] * 6
    cut, due = due_skill(prompts, 2)
    assert set(cut[:, -1].tolist()) == {chains.MARKER}
    assert due.tolist() == [1 + SKILLS.index(chosen[n % 2][1]) for n in range(6)]
    knowing = torch.zeros(5, 6, prompts.tokens_BT.shape[1], chains.VOCABULARY)
    following = prompts.tokens_BT.roll(-1, 1)
    for member in range(5):
        mine = (prompts.owner_BT.roll(-1, 1) == member)[..., None]
        knowing[member] = 9 * mine * torch.nn.functional.one_hot(following, chains.VOCABULARY)
    assert not wrong(oracle(knowing.log_softmax(-1), prompts), prompts).any()


@pytest.mark.parametrize("size", ["cpu", "full"])
def test_both_roads_see_as_many_rows(size: str) -> None:
    setting = experiment.size_of(size)
    recipe = setting.recipe
    theirs = recipe.base_updates * recipe.base_rows + len(recipe.skills) * recipe.expert_updates * recipe.expert_rows
    assert 0 <= theirs - setting.model_updates * setting.model_rows < setting.model_rows


def test_crossings() -> None:
    points = [(0.0, 0.1), (0.5, 0.5), (0.75, 0.9)]
    assert experiment.crossing(points, 0.3) == 0.25
    assert experiment.crossing(points, 0.05) == 0.0
    assert experiment.crossing(points, 0.95) is None


def test_what_is_read_is_what_the_models_own_layer_holds() -> None:
    shape = Shape(chains.VOCABULARY, 16, 2, 2)
    params = {name: 3 * value for name, value in initialise(shape, 3, drawn()).items()}
    prompts = gold(combinations(SKILLS, 2), SKILLS, 24, drawn())
    found = read(params, shape, prompts, "three")
    llama, layer = to_llama(params, shape, 2), "model.layers.1"
    cut, _ = due_skill(prompts, 2)

    def run(ids: torch.Tensor, mask: torch.Tensor) -> object:
        return llama(input_ids=ids, attention_mask=mask)

    slow = text_features(run, llama, [layer], cut.tolist(), [cut.shape[1] - 1] * 24)[layer]
    assert torch.allclose(found.x_END[2].double(), slow, atol=2e-3, rtol=2e-3)
    assert len(found.groups_N.unique()) == 12
    params["1.down"][1, 0, 0] = torch.nan
    with pytest.raises(TrainingError, match=r"three, model 1: layer 1 is not finite; neither are .* 1\.down"):
        read(params, shape, prompts, "three")


@pytest.mark.slow
def test_processes_decode_what_one_does() -> None:
    due, groups = (torch.arange(48) % 4).numpy(), (torch.arange(48) % 12).numpy()
    jobs = [(torch.randn(48, 6, generator=drawn(seed)).numpy(), due, groups, 1) for seed in range(2)]
    assert list(decode_all(jobs, 2)) == list(decode_all(jobs, 1))


def test_the_experiment_runs_at_a_toy_size_and_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = experiment.size_of("cpu")
    shape = dataclasses.replace(real.recipe.shape, width=16, layers=1)
    recipe = dataclasses.replace(real.recipe, shape=shape, base_updates=2, base_rows=2, expert_updates=2, expert_rows=2)
    toy = dataclasses.replace(real, recipe=recipe, shares=(0.0, 0.25, 0.5, 0.75), rows=12, model_rows=4)
    hurried = dataclasses.replace(toy, first_minutes=0.0)
    monkeypatch.setattr(experiment, "size_of", lambda name: hurried)
    monkeypatch.setattr(experiment, "ROWS", 48)
    said: list[str] = []
    with monkeypatch.context() as stopped:
        stopped.setattr(experiment, "decode_all", interrupted)
        with pytest.raises(KeyboardInterrupt) as stop:
            experiment.run(0, tmp_path, "full", log=said.append)
    folder = tmp_path / "bridge-state"
    assert stop.value.__notes__ == [f"what is done is kept in {folder}: run the same command again to go on"]
    assert sorted(path.name for path in folder.iterdir()) == ["cells.json", "features.safetensors"]
    features = (folder / "features.safetensors").read_bytes()
    (folder / "features.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"bridge-state is damaged.* Remove that folder"):
        experiment.run(0, tmp_path, "full", log=said.append)
    (folder / "features.safetensors").write_bytes(features)
    monkeypatch.setattr(experiment, "score_experts", None)  # not called from here on: what it made is kept
    first = experiment.run(0, tmp_path, "full", log=said.append)
    assert not first.holds
    assert any("run the same command again" in text for text in said)
    monkeypatch.setattr(experiment, "size_of", lambda name: toy)
    kept = json.loads((folder / "cells.json").read_text())
    assert 0 < kept["seconds"] <= first.seconds
    (folder / "cells.json").write_text(json.dumps({**kept, "seconds": 1e6}))
    assert State(folder, [7]).stopwatch.seconds < 1e6  # of other seeds
    result = experiment.run(0, tmp_path, "full", log=said.append)
    assert 1e6 < result.seconds < 1e6 + 600
    content = result.write(tmp_path)
    ids = {claim["id"] for claim in content["claims"]}
    assert {"finished", "single-2", "composed-aligned-2", "crossing-aligned-2"} <= ids
    assert all(0 <= score <= 1 for _, score in experiment.by_model(content["tables"]["models"], 2))
    assert (tmp_path / "bridge.png").is_file()
    assert content["tables"]["experts"] == first.tables["experts"]
    pairs = [pair for cell in content["tables"]["experts"] for pair in cell.get("pairs", [])]
    assert sorted(tuple(pair["pair"]) for pair in pairs) == sorted(combinations(SKILLS, 2))
    assert all(0 <= pair["knows"] <= 1 for pair in pairs)
    monkeypatch.setattr(experiment, "score_models", None)
    kept = json.loads((folder / "cells.json").read_text())
    assert 1e6 < kept.pop("seconds") <= result.seconds
    (folder / "cells.json").write_text(json.dumps(kept))  # as older versions wrote it
    again = experiment.run(0, tmp_path, "full", log=said.append)
    assert again.tables == result.tables
    assert again.seconds < 600
    assert [path.name for path in folder.iterdir()] == ["cells.json"]
    for damaged in ("{", "[]", '{"cells": []}'):
        (folder / "cells.json").write_text(damaged)
        with pytest.raises(CheckpointError, match=r"cells\.json is damaged, or another version's"):
            experiment.run(0, tmp_path, "full", log=said.append)


def test_decodability_is_set_against_each_length():
    """It was read on pairs: here they follow it exactly, and longer chains do not."""
    models = []
    for seed, (pairs, longer, known) in enumerate([(0.1, 0.9, 0.2), (0.3, 0.1, 0.4), (0.5, 0.8, 0.6), (0.7, 0.2, 0.8)]):
        models.append({"seed": seed, "share": 0.5, "length": 2, "right": {"share": pairs}})
        models.append({"seed": seed, "share": 0.5, "length": 3, "right": {"share": longer}})
        models[-1]["decodability"] = {"score": known}
    found = {claim.id: claim.value for claim in experiment.claims_of([], models)}
    assert found["decodability-models-2"][0] == 1.0
    assert found["decodability-models-3"][0] < 0
    assert "decodability-experts" not in found
    alike = [{**model, "right": {"share": 0.0}} for model in models]
    assert not any(claim.id.startswith("decodability") for claim in experiment.claims_of([], alike))


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_what_layers_hold_at_full_size_fits_a_file() -> None:
    size = experiment.size_of("full")
    skills, width = len(size.recipe.skills), size.recipe.shape.width
    experts = size.seeds * len(size.recipe.regimes) * skills * 8 * len(combinations(size.recipe.skills, 2)) * width
    models = size.seeds * len(size.shares) * ROWS * width
    assert 2 * (experts + models) < 15 * 2**20
