"""The judge knows its templates, and models learn what they are shown."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from tessellm_lab.images import experiment, scenes
from tessellm_lab.images.flow import REPORTS, Flow


def drawn(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_judge_knows_every_picture_even_under_noise() -> None:
    every = torch.arange(len(scenes.combinations())).repeat(2)
    assert len(every) == 2 * 6 * 6 * 4
    pictures = scenes.pictures(every, drawn())
    assert pictures.min() == -1
    assert pictures.max() == 1
    assert torch.equal(scenes.judge(pictures), every)
    noisy = pictures + 0.3 * torch.randn(pictures.shape, generator=drawn(1))
    assert (scenes.judge(noisy) == every).float().mean() > 0.98
    static = scenes.judge(torch.randn(200, scenes.PIXELS, generator=drawn(2)))
    assert (static == torch.arange(200) % 144).float().mean() < 0.1


def test_pictures_show_what_they_are_told() -> None:
    row = [scenes.prompt(c) for c in scenes.combinations()].index("a blue ring, bottom left")
    picture = scenes.templates()[row, 4].view(12, 12, 3)  # no jitter
    ink = (picture[..., 2] == 1) & (picture[..., :2] == -1).all(-1)
    assert int(ink.sum()) == 12
    assert ink[7:11, 1:5].sum() == 12
    assert scenes.one_hot(torch.tensor([row])).sum() == 3


def test_splits_hold_every_part_and_nest_by_seed() -> None:
    for share in experiment.HELD_OUT:
        train, held = experiment.split(share, 3)
        assert len(held) == int(share * 144)
        parts = scenes.combinations()[train[: experiment.PROBE_COMBINATIONS]]
        assert [len(parts[:, n].unique()) for n in range(3)] == list(scenes.SIZES)
    few, many = experiment.split(0.9, 3)[0], experiment.split(0.25, 3)[0]
    assert set(few.tolist()) <= set(many.tolist())


def test_a_model_learns_its_combinations_and_is_alone_in_its_stack() -> None:
    flow = Flow(128, 2, updates=900, rows=64)
    trained = torch.tensor([0, 30, 77, 140])
    said: list[str] = []
    params = flow.train([trained, torch.tensor([5, 60, 99, 120])], 0, "cpu", said.append)
    assert len(said) == REPORTS
    pictures, hidden = flow.sample(params, trained.repeat(8).expand(2, -1), drawn())
    right = [(scenes.judge(pictures[n]) == trained.repeat(8)).float().mean().item() for n in range(2)]
    assert right[0] > 0.7
    assert right[1] < 0.4  # the other model never saw these
    assert hidden.shape == (2, 32, 128)


def test_the_probe_reads_what_is_there_and_not_what_is_not() -> None:
    order = torch.randperm(144, generator=drawn(7))
    fit_on, test_on = order[:40].repeat(6), order[40:].repeat(2)
    mix = torch.randn(sum(scenes.SIZES), 40, generator=drawn())

    def features(on: torch.Tensor, seed: int) -> torch.Tensor:
        return scenes.one_hot(on) @ mix + 0.1 * torch.randn(len(on), 40, generator=drawn(seed))

    parts = scenes.combinations()[fit_on]
    assert all(len(parts[:, n].unique()) == size for n, size in enumerate(scenes.SIZES))
    read = experiment.probe(features(fit_on, 1), fit_on, features(test_on, 2), test_on)
    assert read.float().mean() > 0.9
    assert experiment.probe_across(features(test_on, 2), test_on, order[40:]) > 0.9
    assert experiment.probe_across(torch.randn(len(test_on), 40, generator=drawn(3)), test_on, order[40:]) < 0.4
    shuffled = experiment.probe(features(fit_on, 1), fit_on, features(test_on, 2), test_on, shuffle=0)
    assert shuffled.float().mean() < 0.5


def test_the_experiment_runs_at_a_toy_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy = dataclasses.replace(experiment.SIZES["cpu"], flows=(Flow(16, 1, updates=5, rows=8),), samples=2)
    monkeypatch.setitem(experiment.SIZES, "cpu", toy)
    monkeypatch.setattr(experiment, "PROBE_SAMPLES", 2)
    content = experiment.run(0, tmp_path, "cpu", lambda text: None).write(tmp_path)
    assert len(content["tables"]["models"]) == 12
    assert {claim["id"] for claim in content["claims"]} >= {
        "correlation",
        "correlation-across",
        "within",
        "shuffled",
        "random-weights",
        "across-16",
    }
    assert (tmp_path / "images.png").is_file()
