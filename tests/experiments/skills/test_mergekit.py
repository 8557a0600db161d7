"""The one-function merging baselines against mergekit's own merges of the same checkpoints."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tessellm.experiments.skills.baselines import merge

from conftest import build_model, perturbed

EXPERTS = ("a", "b", "c")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("merging")
    base = build_model("llama", 0, tie_word_embeddings=False)
    base.save_pretrained(folder / "base")
    for seed, name in enumerate(EXPERTS, 1):
        perturbed(base, seed).save_pretrained(folder / name)
    return folder


def by_mergekit(
    folder: Path, method: str, settings: dict | None = None, **parameters: float
) -> dict[str, torch.Tensor]:
    models = [{"model": str(folder / name), "parameters": {"weight": 1.0, **parameters}} for name in EXPERTS]
    recipe = {"merge_method": method, "base_model": str(folder / "base"), "dtype": "float32", "models": models}
    recipe["parameters"] = settings or {}
    (folder / f"{method}.yaml").write_text(json.dumps(recipe))
    script = Path(sys.executable).with_name("mergekit-yaml")
    command = [script, folder / f"{method}.yaml", folder / method, "--no-copy-tokenizer", "--quiet"]
    subprocess.run(command, check=True, capture_output=True)
    return load_file(next((folder / method).glob("*.safetensors")))


def stacked(folder: Path) -> dict[str, torch.Tensor]:
    members = [load_file(folder / name / "model.safetensors") for name in ("base", *EXPERTS)]
    return {key: torch.stack([member[key] for member in members]) for key in members[0]}


@pytest.mark.parametrize(("method", "density"), [("task-arithmetic", None), ("ties", 0.2)])
def test_ours_equals_mergekits(folder, method, density):
    expected = by_mergekit(folder, method.replace("-", "_"), **({} if density is None else {"density": density}))
    ours = merge(method, stacked(folder), scale=1.0)
    assert set(expected) == set(ours)
    for key, tensor in expected.items():
        torch.testing.assert_close(ours[key][0], tensor, rtol=0, atol=1e-5)


def test_dare_drops_as_mergekit_does_and_rescales_as_its_paper_does(folder):
    """Chance decides which entries stay, so both merges must lie on the same eight points, and keep half of them.
    Ours divides what stays by the density, as the paper does; mergekit restores the l1 norm, unless told not to."""
    members = stacked(folder)
    subsets = torch.tensor([[n >> bit & 1 for bit in range(3)] for n in range(8)]).float()
    theirs = by_mergekit(folder, "dare_linear", settings={"rescale": False}, density=0.5)
    for merged, factor in ((theirs, 1.0), (merge("dare", members, scale=1.0), 2.0)):
        kept, entries = 0.0, 0
        for key, member_M in members.items():
            task_KP = (member_M[1:] - member_M[:1]).flatten(1)
            got_P = merged[key].reshape(-1) - member_M[0].flatten()
            distance_SP = (factor * subsets @ task_KP - got_P).abs()
            assert distance_SP.amin(0).max() < 1e-5
            kept += subsets[distance_SP.argmin(0)].sum().item()
            entries += task_KP.numel()
        assert kept / entries == pytest.approx(0.5, abs=0.02)
