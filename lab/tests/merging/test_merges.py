"""Merging by mergekit: what it writes loads, repeats by its seed, and what it cannot merge is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tessellm.errors import MemberError, RecipeError
from tessellm_lab.merging.merges import merge, methods_for, recipe

from conftest import build_model, character_tokenizer, perturbed, save_member


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("merged")
    base = build_model("llama", 0, tie_word_embeddings=False)
    made = {"base": base, "math": perturbed(base, 1), "coding": perturbed(base, 2)}
    return {name: str(save_member(model, folder / name, character_tokenizer())) for name, model in made.items()}


def weights(folder: str | Path) -> dict[str, torch.Tensor]:
    return load_file(next(Path(folder).glob("*.safetensors")))


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
