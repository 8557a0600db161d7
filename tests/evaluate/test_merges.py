"""Merging by mergekit, held to one-function references."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tessellm.errors import MemberError, RecipeError
from tessellm.evaluate.merges import merge, methods_for, recipe
from tessellm.experiments.skills.baselines import merge as reference

from conftest import build_model, character_tokenizer, perturbed, save_member


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("merged")
    base = build_model("llama", 0, tie_word_embeddings=False)
    made = {"base": base, "math": perturbed(base, 1), "coding": perturbed(base, 2)}
    return {name: str(save_member(model, folder / name, character_tokenizer())) for name, model in made.items()}


def weights(folder: str | Path) -> dict[str, torch.Tensor]:
    return load_file(next(Path(folder).glob("*.safetensors")))


@pytest.mark.parametrize(
    ("method", "strength"), [("linear", None), ("task-arithmetic", 0.4), ("ties", 0.7), ("slerp", 0.3)]
)
def test_merges_are_what_the_references_compute(
    folders: Mapping[str, str], tmp_path: Path, method: str, strength: float | None
) -> None:
    experts = {name: path for name, path in folders.items() if name != "base"}
    found = weights(merge(method, folders["base"], experts, tmp_path / method, strength))
    members = [weights(folders[name]) for name in ("base", "math", "coding")]
    stacked = {key: torch.stack([member[key] for member in members]) for key in members[0]}
    expected = {key: tensor[0] for key, tensor in reference(method, stacked, strength or 0).items()}
    assert set(found) == set(expected)
    for key, tensor in found.items():
        torch.testing.assert_close(tensor, expected[key].float(), rtol=0, atol=1e-4)


def test_a_merge_loads_with_its_tokenizer_and_dare_with_its_seed(folders: Mapping[str, str], tmp_path: Path) -> None:
    experts = {name: path for name, path in folders.items() if name != "base"}
    one, same, other = (
        merge("dare", folders["base"], experts, tmp_path / str(number), 0.5, seed)
        for number, seed in enumerate((0, 0, 1))
    )
    assert AutoModelForCausalLM.from_pretrained(one).dtype == torch.float32
    assert AutoTokenizer.from_pretrained(one)("ab")["input_ids"] == character_tokenizer()("ab")["input_ids"]
    key = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(weights(one)[key], weights(same)[key])
    assert not torch.equal(weights(one)[key], weights(other)[key])


def test_dare_drops_and_rescales_as_the_reference_does(folders: Mapping[str, str], tmp_path: Path) -> None:
    """Draws differ. That every entry is the base's with each delta dropped or rescaled does not, nor how often. The
    reference doubles what it keeps of half the entries; mergekit keeps each tensor's L1 norm, which is nearly that."""
    experts = {name: path for name, path in folders.items() if name != "base"}
    members = [weights(folders[name]) for name in ("base", "math", "coding")]
    stacked = {key: torch.stack([member[key] for member in members]) for key in members[0]}
    theirs = weights(merge("dare", folders["base"], experts, tmp_path / "dare", 0.5))
    ours = {key: tensor[0] for key, tensor in reference("dare", stacked, 0.5).items()}
    for key in ("model.layers.0.mlp.up_proj.weight", "lm_head.weight"):
        base, *deltas = stacked[key][0], *(stacked[key][1:] - stacked[key][0])
        for found, tolerance in ((theirs[key], 0.1), (ours[key], 1e-4)):
            scales = [1.0, 1.0]  # λ · 2
            for _ in range(3):  # guess who was kept, then by how much
                ways = [base + a * scales[0] * deltas[0] + b * scales[1] * deltas[1] for a in (0, 1) for b in (0, 1)]
                distance, way = (found - torch.stack(ways)).abs().min(0)
                alone = [
                    (found - base)[way == number] / delta[way == number]
                    for number, delta in ((2, deltas[0]), (1, deltas[1]))
                ]
                scales = [ratio.median().item() for ratio in alone]
            assert distance.max() < 1e-5
            assert scales == pytest.approx([1.0, 1.0], abs=tolerance)
            share = way.flatten().bincount(minlength=4) / way.numel()
            torch.testing.assert_close(share, torch.full((4,), 0.25), rtol=0, atol=0.06)


@pytest.mark.parametrize("method", ["linear", "slerp"])
def test_gemma_2_merges_and_is_stored_as_asked(tmp_path: Path, method: str) -> None:
    base = build_model("gemma2", 0)
    for name, model in {"base": base, "math": perturbed(base, 1), "coding": perturbed(base, 2)}.items():
        save_member(model, tmp_path / name)  # no tokenizer: nothing is copied, nothing is said
    experts = {name: str(tmp_path / name) for name in ("math", "coding")}
    model = AutoModelForCausalLM.from_pretrained(
        merge(method, str(tmp_path / "base"), experts, tmp_path / "out", dtype="bfloat16")
    )
    assert (type(model).__name__, model.dtype) == ("Gemma2ForCausalLM", torch.bfloat16)


def test_bad_merges_are_named(folders: Mapping[str, str], tmp_path: Path) -> None:
    assert "slerp" in methods_for(2)
    assert "slerp" not in methods_for(3)
    with pytest.raises(RecipeError, match="did you mean 'ties'"):
        recipe("tise", "base", {"a": "a"})
    with pytest.raises(RecipeError, match="merges two experts; got 1"):
        recipe("slerp", "base", {"a": "a"})
    with pytest.raises(MemberError, match="mergekit could not merge a by ties"):
        merge("ties", folders["base"], {"a": str(tmp_path / "nowhere")}, tmp_path / "out")
    assert not (tmp_path / "out").exists()
