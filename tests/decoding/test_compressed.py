"""Compressed fine-tunes: nothing is lost where a delta has the rank; else the loss is measured, or refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tessellm
from tessellm.decoding.compressed import best_factors, compress, measure_loss
from tessellm.decoding.engine import Engine
from tessellm.decoding.groups import plan
from tessellm.decoding.sampling import Sampling
from tessellm.errors import EngineError

from conftest import build_model, perturbed
from decoding_cases import composition, prompts, unexcused


@torch.no_grad()
def low_rank_tune(base: Any, seed: int, rank: int = 3, norms: bool = True) -> Any:
    """A full fine-tune whose linear layers moved in few directions; norms and embeddings moved too."""
    tuned = copy.deepcopy(base)
    generator = torch.Generator().manual_seed(seed)
    for module in tuned.modules():
        if isinstance(module, nn.Linear):
            left, right = (torch.randn(size, rank, generator=generator) for size in module.weight.shape)
            module.weight += 0.1 * left @ right.T
        elif (norms and isinstance(module, nn.Embedding)) or "Norm" in type(module).__name__:
            module.weight += 0.05 * torch.randn(module.weight.shape, generator=generator)
    return tuned


@pytest.mark.parametrize("arch", ["llama", "gemma2", "qwen2"])
def test_nothing_is_lost_where_the_rank_suffices(arch: str) -> None:
    base = build_model(arch, tie_word_embeddings=False)
    model = tessellm.compose(base, {"a": low_rank_tune(base, 1), "b": low_rank_tune(base, 2)})
    small, loss = compress(model, rank=3, limit=1e-6)
    assert (loss.experts, loss.ranks, loss.same_best) == (("a", "b"), (3, 3), 1.0)
    assert loss.bytes_after < loss.bytes_before
    assert plan(model) == [(0,), (1,), (2,)]
    assert plan(small) == [(0, 1, 2)]  # the base's weights are read once
    requests = Engine(small, slots=3).generate(prompts(5, 40), Sampling(max_new_tokens=12))
    assert not unexcused(small, requests)
    assert not unexcused(model, requests)


def test_tied_embeddings_and_experts_that_share_layers() -> None:
    base = build_model("llama", tie_word_embeddings=True)
    model = tessellm.compose(base, {"a": low_rank_tune(base, 1, norms=False), "b": perturbed(base, 2, only="norm")})
    small, loss = compress(model, energy=1 - 1e-9, limit=1e-6)
    assert loss.experts == ("a", "b")
    assert plan(small) == [(0, 1, 2)]
    requests = Engine(small, slots=2).generate(prompts(4, 40), Sampling(max_new_tokens=12))
    assert not unexcused(model, requests)


def test_a_full_rank_change_is_refused_with_the_numbers() -> None:
    base = build_model("llama")
    model = tessellm.compose(base, {"a": perturbed(base, 1)}, rule="product")
    with pytest.raises(EngineError, match=r"compressing a loses too much \(limit 0.01 .* KL\(exact .*best tokens"):
        compress(model, rank=2)
    losses = [compress(model, rank=rank, limit=float("inf"))[1].kl for rank in (1, 4, 16, 32)]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > 0.05
    assert losses[-1] < 1e-6


def test_the_loss_is_the_kl_of_the_compositions() -> None:
    base = build_model("llama")
    model = tessellm.compose(base, {"a": perturbed(base, 1)})
    text = prompts(1, 30, seed=4)
    small, loss = compress(model, rank=8, limit=float("inf"), texts=text)
    with torch.no_grad():
        exact, rough = (each(torch.tensor(text)).logits[0].double() for each in (model, small))
    kl = nn.functional.kl_div(rough, exact, log_target=True, reduction="none").sum(-1)
    assert loss.tokens == len(text[0])
    assert loss.kl == pytest.approx(kl.mean().item(), rel=1e-6)
    assert loss.largest == pytest.approx(kl.max().item(), rel=1e-6)
    assert measure_loss(model, model, text, (), (0, 0)).kl == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("shape", [(6, 20), (20, 6)])
def test_factors_are_the_truncated_svd(shape: tuple[int, int]) -> None:
    delta = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    u, s, v = torch.linalg.svd(delta, full_matrices=False)
    down, up = best_factors(delta, 2, None)
    torch.testing.assert_close(up @ down, u[:, :2] @ s[:2].diag() @ v[:2])
    share = (s[:3].square().sum() / s.square().sum()).item()
    assert len(best_factors(delta, 1, share - 1e-9)[0]) == 3
    assert len(best_factors(delta, 1, share + 1e-9)[0]) == 4


def test_what_cannot_be_compressed_is_said(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="nothing to compress"):
        compress(composition("adapters", tmp_path))
    base = build_model("llama")
    model = tessellm.compose(base, {"a": perturbed(base, 1)})
    for wrong, said in (
        ({"rank": 0}, "at least 1"),
        ({"energy": 1.5}, "0 < energy ≤ 1"),
        ({"rank": 2, "energy": 0.5}, "not both"),
    ):
        with pytest.raises(EngineError, match=said):
            compress(model, **wrong)  # type: ignore[arg-type]
