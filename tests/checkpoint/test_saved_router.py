"""A composition's router on disk: loaded as it was saved, and nothing measured again."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import tessellm
from tessellm.checkpoint import load
from tessellm.errors import CheckpointError
from tessellm.routing import calibrated
from tessellm.routing.calibration import calibration_prompts
from tessellm.routing.router import VERSION, DeltaRouter

from routers import HandMade

PROMPTS = ["what is 3 + 4?", "hello", "write a loop"]


@pytest.fixture(autouse=True)
def few(monkeypatch, tmp_path):
    few = [text for text in calibration_prompts() if len(text) < 60][:40]
    monkeypatch.setattr(calibrated, "calibration_prompts", lambda: few)
    monkeypatch.setenv("TESSELLM_CACHE", str(tmp_path / "cache"))


def composed(members, kind="lora_", **options):
    experts = {
        "math": {"source": members / f"{kind}math", "description": "Adds numbers.", "examples": ["1 + 1"]},
        "coding": members / f"{kind}coding",
    }
    return tessellm.compose(members / "base", experts, **{"rule": "mixture", "base_retention": 0.9, **options})


def check_routes(again, model):
    for found, expected in zip(again.route(PROMPTS), model.route(PROMPTS), strict=True):
        assert (found.selected, found.threshold) == (expected.selected, expected.threshold)
        assert found.prior == pytest.approx(expected.prior, rel=1e-3)
        for name, score in expected.scores.items():
            assert found.scores[name] == (None if score is None else pytest.approx(score, rel=1e-3))


@pytest.mark.parametrize("kind", ["lora_", ""])
@pytest.mark.parametrize("self_contained", [False, True])
def test_a_router_is_loaded_as_it_was_saved(members_dir, tmp_path, monkeypatch, kind, self_contained):
    model = composed(members_dir, kind)
    model.save_pretrained(tmp_path / "out", self_contained=self_contained)
    monkeypatch.setattr(DeltaRouter, "calibrate", None)
    again = load(tmp_path / "out")
    check_routes(again, model)
    assert again.config.routing == {"base_retention": 0.9}
    assert again.config.members[1]["description"] == "Adds numbers."
    assert again.config.members[1]["examples"] == ["1 + 1"]
    ids = torch.tensor([[5, 9, 13, 20]])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False}
    assert torch.equal(again.generate(ids, **options), model.generate(ids, **options))


def test_a_composition_without_its_router_calibrates_one(members_dir, tmp_path):
    model = composed(members_dir)
    model.save_pretrained(tmp_path / "out")
    (tmp_path / "out" / "router.safetensors").unlink()
    again = load(tmp_path / "out")
    check_routes(again, model)


def test_a_router_of_another_version_is_calibrated_anew(members_dir, tmp_path):
    model = composed(members_dir)
    model.save_pretrained(tmp_path / "out")
    file = tmp_path / "out" / "router.safetensors"
    save_file(load_file(file), file, metadata={"router": json.dumps({"version": VERSION - 1})})
    again = load(tmp_path / "out")
    check_routes(again, model)
    assert "The stored router is of another version and was calibrated anew" in again.notes[-1]


def test_a_composition_that_wants_no_router_gets_none(members_dir, tmp_path):
    composed(members_dir, router=False).save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out" / "router.safetensors").exists()
    assert load(tmp_path / "out").router is None
    assert load(tmp_path / "out", only="math").router is None


def test_a_damaged_router_is_named(members_dir, tmp_path):
    composed(members_dir).save_pretrained(tmp_path / "out")
    file = tmp_path / "out" / "router.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=r"router.safetensors is cut off or damaged. Remove it"):
        load(tmp_path / "out")
    file.write_bytes(whole)
    tensors = load_file(file)
    for metadata in (None, {"router": "{"}, {"router": json.dumps({"version": VERSION})}):
        save_file(tensors, file, metadata=metadata)
        with pytest.raises(CheckpointError, match=r"router.safetensors is cut off or damaged. Remove it"):
            load(tmp_path / "out")


@pytest.mark.parametrize(
    "routing",
    [{"base_retention": 2.0}, {"base_retention": True}, {"embedder": ""}, {"retention": 0.9}, 3, {"enabled": 1}],
)
def test_settings_that_a_hand_changed_are_refused(members_dir, tmp_path, routing):
    composed(members_dir).save_pretrained(tmp_path / "out")
    file = tmp_path / "out" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "routing": routing}))
    with pytest.raises(CheckpointError, match=r"config.json is damaged: .*routing"):
        load(tmp_path / "out")


def test_a_router_of_ones_own_is_not_saved(members_dir, tmp_path):
    model = composed(members_dir)
    model.router = HandMade("math", "coding")
    with pytest.raises(CheckpointError, match="the router HandMade is your own and cannot be saved"):
        model.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()
