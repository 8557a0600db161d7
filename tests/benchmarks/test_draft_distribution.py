"""The test that samples have one distribution: its numbers, that it keeps to its level, and that it catches a bias."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import draft_distribution as distribution
from draft_distribution import compared, draw, p_value, warm_draws
from tessellm.engine.engine import Engine

from speculation_cases import bias, drafting, tiny

DRAWS, DRAWS_WITHOUT = 300, 600


def test_against_numbers_worked_out_by_hand() -> None:
    assert p_value({(0,): 10, (1,): 20}, {(0,): 20, (1,): 10}) == pytest.approx(0.0098231, rel=1e-4)  # χ² = 20/3
    assert p_value({(0,): 30, (1,): 30, (2,): 40}, {(0,): 30, (1,): 30, (2,): 40}) == pytest.approx(1.0)
    assert p_value({(0,): 50, (1,): 50}, {(0,): 5, (1,): 5}) == pytest.approx(1.0)  # samples of different sizes
    rare, others = ({(n,): 1 for n in range(first, first + 20)} for first in (10, 30))  # in one cell
    assert p_value({(0,): 80, **rare}, {(0,): 80, **others}) == pytest.approx(1.0)
    assert p_value({(0,): 80, **rare}, {(0,): 100}) < 1e-4
    with pytest.raises(ValueError, match="frequent enough"):
        p_value({(0,): 100}, {(0,): 100})


def test_keeps_to_its_level() -> None:
    generator = torch.Generator().manual_seed(0)
    share_N = torch.tensor([0.4, 0.3, 0.1, 0.1, 0.05, 0.02, 0.02, 0.01])

    def sample(count: int) -> Counter[tuple[int, ...]]:
        return Counter((n,) for n in torch.multinomial(share_N, count, True, generator=generator).tolist())

    found = torch.tensor([p_value(sample(300), sample(600)) for _ in range(400)])
    assert 0.02 < float((found < 0.05).float().mean()) < 0.09
    assert abs(float(found.mean()) - 0.5) < 0.06


def test_drafts_pass_and_a_bias_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """At fewer draws than the benchmark has at batch 1. The mistake: noise that is the same at every position."""
    model, prompt = tiny(), [0, 1, 2, 3, 0, 1, 2]
    without = warm_draws(Engine(model, slots=16), prompt, DRAWS_WITHOUT)
    assert max(without.texts.values()) < 0.5 * DRAWS_WITHOUT
    right = compared(drafting(model, 8, 3), without, DRAWS)
    engine = drafting(model, 8, 3)
    bias(monkeypatch)
    wrong = compared(engine, without, DRAWS)
    assert right["accepted"] > 0.02
    assert right["p_value"] >= 1e-3
    assert wrong["p_value"] < 1e-3


def test_seeds_are_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same seeds write the same texts with drafts and without; it would be no test."""
    seeds: list[int] = []
    plain = draw

    def noted(engine: Any, prompt: Any, count: int, temperature: float, first_seed: int = 0) -> Any:
        seeds.extend(range(first_seed, first_seed + count))
        return plain(engine, prompt, count, temperature, first_seed)

    monkeypatch.setattr(distribution, "draw", noted)
    model = tiny()
    without = warm_draws(Engine(model, slots=16), [0, 1, 2, 3, 0, 1], 50)
    seeds[:-50] = []
    compared(drafting(model, 8, 3), without, 50)
    assert len(set(seeds)) == 100
