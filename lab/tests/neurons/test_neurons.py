"""The constructed networks are what the theorem says: within their bound everywhere, of the count that it states."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tessellm_lab.neurons import experiment
from tessellm_lab.neurons.construction import approximate, exact_binary, reach
from tessellm_lab.scale.teacher import Hyperteacher


def test_the_teacher_is_the_scale_experiments() -> None:
    stacked = Hyperteacher.random([4], 6, 3, 5, "cpu")
    of = experiment.teacher(6, 4, size=5)
    z, x = experiment.points(of, 20, torch.Generator().manual_seed(0), "discrete")
    theirs = stacked.answer(z[None].float(), x[None, :, None].float())[0, :, 0]
    assert torch.allclose(of(z, x).float(), theirs, atol=1e-5)


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 9), st.integers(2, 12), st.integers(1, 4), st.integers(0, 10**6))
def test_the_error_is_under_the_bound_on_random_teachers(modules: int, pieces: int, size: int, seed: int) -> None:
    of = experiment.teacher(modules, seed, most=min(3, modules), size=size)
    network = approximate(of, pieces)
    assert network.neurons == 2 * size * size * pieces + 2 * size
    z, x = experiment.points(of, 50, torch.Generator().manual_seed(seed), "continuous")
    corners = x.sign()
    for inputs in (x, corners):
        assert experiment.largest_error(network, of, z, inputs).max() <= network.bound * (1 + 1e-9)
    assert experiment.climb(network, of, z, x) <= network.bound * (1 + 1e-9)


def test_climbing_finds_more_than_chance() -> None:
    of = experiment.teacher(8, 0)
    network = approximate(of, 8)
    z, x = experiment.points(of, 200, torch.Generator().manual_seed(1), "continuous")
    chance = experiment.largest_error(network, of, z, x).max().item()
    assert chance < experiment.climb(network, of, z, x) <= network.bound


def test_the_square_needs_its_reach() -> None:
    """Outside [−R, R] the pieces leave the parabola: a reach that were too small would break the bound."""
    of = experiment.teacher(8, 0)
    assert reach(of) > 1
    network = approximate(of, 32)
    z, x = experiment.points(of, 50, torch.Generator().manual_seed(1), "continuous")
    assert experiment.largest_error(network, of, 20 * z, x).max() > network.bound


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 9), st.integers(1, 5), st.integers(0, 10**6))
def test_binary_latents_have_an_exact_network(modules: int, size: int, seed: int) -> None:
    of = experiment.teacher(modules, seed, most=min(3, modules), size=size)
    network = exact_binary(of)
    assert network.neurons == 2 * modules * size + size
    z, x = experiment.points(of, 60, torch.Generator().manual_seed(seed), "khot")
    assert experiment.largest_error(network, of, z, x).max() < 1e-12


def test_the_experiment_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment, "MODULES", (4, 8))
    monkeypatch.setattr(experiment, "PIECES", (4, 8))
    monkeypatch.setattr(experiment, "CLIMB_STEPS", 5)
    result = experiment.run(0, tmp_path, "cpu", lambda text: None)
    assert result.holds
    assert (tmp_path / "neurons.png").is_file()
