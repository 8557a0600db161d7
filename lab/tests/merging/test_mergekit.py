"""The merging baselines, one function each after its paper, against the merges that `evaluate` makes with mergekit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tessellm_lab.merging.merges import merge
from tessellm_lab.skills.baselines import merge as reference

from conftest import build_model, character_tokenizer, perturbed, save_member

EXPERTS = ("math", "coding", "law")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("merging")
    base = build_model("llama", 0, tie_word_embeddings=False)
    made = {"base": base, **{name: perturbed(base, seed) for seed, name in enumerate(EXPERTS, 1)}}
    return {name: str(save_member(model, folder / name, character_tokenizer())) for name, model in made.items()}


def weights(folder: str | Path) -> dict[str, torch.Tensor]:
    return load_file(next(Path(folder).glob("*.safetensors")))


def stack(*members: str) -> dict[str, torch.Tensor]:
    found = [weights(member) for member in members]
    return {key: torch.stack([member[key] for member in found]) for key in found[0]}


@pytest.mark.parametrize(
    ("method", "strength", "experts"),
    [("linear", None, 3), ("task-arithmetic", 0.4, 3), ("ties", 0.7, 3), ("slerp", 0.3, 2)],
)
def test_merges_are_what_the_references_compute(
    folders: Mapping[str, str], tmp_path: Path, method: str, strength: float | None, experts: int
) -> None:
    chosen = {name: folders[name] for name in EXPERTS[:experts]}
    found = weights(merge(method, folders["base"], chosen, tmp_path / method, strength))
    stacked = stack(folders["base"], *chosen.values())
    expected = {key: tensor[0] for key, tensor in reference(method, stacked, strength or 0).items()}
    assert set(found) == set(expected)
    for key, tensor in found.items():
        torch.testing.assert_close(tensor, expected[key].float(), rtol=0, atol=1e-4)


def test_dare_drops_and_rescales_as_the_reference_does(folders: Mapping[str, str], tmp_path: Path) -> None:
    """Draws differ. That every entry is the base's with each delta dropped or rescaled does not, nor how often. The
    reference doubles what it keeps of half the entries; mergekit keeps each tensor's L1 norm, which is nearly that."""
    experts = {name: folders[name] for name in EXPERTS[:2]}
    stacked = stack(folders["base"], *experts.values())
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
