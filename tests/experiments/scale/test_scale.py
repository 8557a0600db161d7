"""Runs in a stack do not touch each other; what was stopped goes on."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from scale_cases import TOY, drawn
from torch import Tensor

from tessellm.errors import CheckpointError
from tessellm.experiments.correlation import correlation
from tessellm.experiments.scale import encodings, experiment, stacks, stages
from tessellm.experiments.scale.measure import decode, measure
from tessellm.experiments.scale.networks import Mlp, Transformer
from tessellm.experiments.scale.training import Run, Stack, Trainer


def plain_mlp(params: dict[str, Tensor], run: int, code: Tensor, x: Tensor) -> Tensor:
    h = torch.cat([code, x], -1) @ torch.cat([params["code"][run], params["sample"][run]])
    h = h + params["bias.0"][run]
    for layer in range(1, len([name for name in params if name.isdigit()]) + 1):
        h = h.relu() @ params[f"{layer}"][run] + params[f"bias.{layer}"][run]
    return h


def test_a_stacked_mlp_is_its_runs_one_by_one() -> None:
    network = Mlp(6, 3)
    params = network.initialise([4, 4], 3, 2, drawn())
    code, x = torch.randn(2, 5, 4, generator=drawn(1)), torch.randn(2, 5, 7, 3, generator=drawn(2))
    stacked = network(params, code, x)
    for run in range(2):
        slow = plain_mlp(params, run, code[run][:, None].expand(-1, 7, -1), x[run])
        assert torch.allclose(stacked[run], slow, atol=1e-5)


def test_a_transformer_is_causal_and_its_runs_are_apart() -> None:
    network = Transformer(16, 2, 2)
    params = network.initialise([4, 4], 3, 2, drawn())
    code, x = torch.randn(2, 5, 4, generator=drawn(1)), torch.randn(2, 5, 7, 3, generator=drawn(2))
    before = network(params, code, x)
    x[0, :, 4] += 1
    after = network(params, code, x)
    assert torch.equal(before[1], after[1])
    assert torch.allclose(before[0, :, :4], after[0, :, :4], atol=1e-6)
    assert not torch.allclose(before[0, :, 4:], after[0, :, 4:], atol=1e-3)


def test_a_run_learns_the_same_alone_and_in_company() -> None:
    both = Trainer(TOY, "cpu")
    alone = Trainer(dataclasses.replace(TOY, runs=TOY.runs[1:]), "cpu")
    with torch.no_grad():
        for name, value in alone.params.items():
            value.copy_(both.params[name][1:])
    _, code, x, target = both.draw(both.train_masks, 8, drawn())
    both.family.loss(TOY.network(both.params, code, x), target).sum().backward()
    alone.family.loss(TOY.network(alone.params, code[1:], x[1:]), target[1:]).sum().backward()
    for name, value in alone.params.items():
        assert torch.allclose(both.params[name].grad[1:], value.grad, atol=1e-6), name


def test_training_lowers_the_loss_and_is_measured() -> None:
    stack = dataclasses.replace(TOY, runs=(Run(), Run(support="non_compositional")), network=Mlp(32, 2), steps=400)
    trainer = Trainer(stack, "cpu")
    before = measure(trainer, 128)
    trainer.advance(400)
    rows = measure(trainer, 128)
    assert rows[0]["held_out"]["score"] > before[0]["held_out"]["score"]
    assert rows[0]["trained"]["score"] > 0.6
    assert rows[1]["absent"] == [3]
    assert "absent" in rows[1]["decode"]
    assert rows[1]["held_out"]["score"] < rows[0]["held_out"]["score"]
    assert rows[0]["decode_input"]["held_out"] > 0.95  # the identity: z itself


def test_decoding_finds_a_planted_latent_and_no_other() -> None:
    z = torch.rand(400, 3, generator=drawn())
    noise = torch.randn(400, 20, generator=drawn(1))
    planted = z @ torch.randn(3, 20, generator=drawn(2)) + 0.01 * noise
    absent = torch.tensor([False, False, False])
    assert decode(planted[:200], z[:200], planted[200:], z[200:], absent)["held_out"] > 0.95
    assert decode(noise[:200], z[:200], noise[200:], z[200:], absent)["held_out"] < 0.1


def test_a_stopped_stack_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "LONG", 30)
    monkeypatch.setattr(stages, "POINTS", 4)
    monkeypatch.setattr("tessellm.experiments.scale.training.LOOK_EVERY", 5)
    said: list[str] = []
    real = time.monotonic
    ticks = iter(range(10_000))
    monkeypatch.setattr("tessellm.experiments.scale.training.monotonic", lambda: next(ticks))
    monkeypatch.setattr(stages, "monotonic", lambda: 0)
    assert stages.train_stacks([TOY], tmp_path, "cpu", 4, said.append) == {}
    state = json.loads((tmp_path / "toy.state.json").read_text())
    assert 0 < state["step"] < TOY.steps
    assert all(path.stat().st_size < 16 * 2**20 for path in tmp_path.iterdir())
    for name in ("toy.state.json", "toy.0.safetensors"):
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(whole[: len(whole) // 2])
        with pytest.raises(CheckpointError, match=f"{name} is damaged, or another version's. Remove it"):
            stages.train_stacks([TOY], tmp_path, "cpu", 4, said.append)
        (tmp_path / name).write_bytes(whole)
    monkeypatch.setattr("tessellm.experiments.scale.training.monotonic", real)
    rows = stages.train_stacks([TOY], tmp_path, "cpu", real() + 100, said.append)["toy"]
    assert rows[0]["steps"] == TOY.steps
    steps = [step for step, _ in rows[0]["curve"]]
    assert steps == sorted(set(steps))
    assert steps[0] <= state["step"] <= steps[-1] == TOY.steps
    again = stages.train_stacks([TOY], tmp_path, "cpu", real() + 100, said.append)["toy"]
    assert again == json.loads(json.dumps(rows))  # read, not trained
    (tmp_path / "toy.json").write_text('{"rows": []}')
    with pytest.raises(CheckpointError, match=r"toy\.json is damaged, or another version's"):
        stages.train_stacks([TOY], tmp_path, "cpu", real() + 100, said.append)


def test_a_short_stack_that_would_not_end_in_time_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "TRIAL", 2)
    said: list[str] = []
    slow = dataclasses.replace(TOY, steps=90_000)
    assert stages.train_stacks([slow], tmp_path, "cpu", time.monotonic() + 0.5, said.append) == {}
    assert "left for the next call" in said[0]


def test_resuming_restores_the_weights() -> None:
    first, second = Trainer(TOY, "cpu"), Trainer(TOY, "cpu")
    first.advance(20)
    second.resume({name: value.detach() for name, value in first.params.items()}, 20)
    assert all(torch.equal(first.params[name], second.params[name]) for name in first.params)
    second.advance(40)
    assert second.steps == 40


def test_the_experiment_runs_at_a_toy_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def toys(size: str, seed: int) -> list[Stack]:
        return [
            dataclasses.replace(
                each, steps=4, modules=6, size=4 if each.family == "hyperteacher" else 16, tasks=4,
                network=dataclasses.replace(each.network, width=each.network.width // 8 * 2),
            )
            for each in small(size, seed)
        ]  # fmt: skip

    small = stacks.stacks
    monkeypatch.setattr(experiment, "stacks", toys)
    monkeypatch.setattr("tessellm.experiments.scale.stacks.SHARES", (0.5,))
    result = experiment.run(0, tmp_path, "cpu", log=lambda text: None)
    content: dict[str, Any] = result.write(tmp_path)
    ids = {claim["id"] for claim in content["claims"]}
    assert {
        "identity",
        "fewshot",
        "width-trend",
        "tasks-trend",
        "disconnected",
        "correlation",
        "grid-tasks-trend",
    } <= ids
    assert (tmp_path / "scale.png").is_file()
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def test_every_full_stack_fits_the_limits_of_a_call() -> None:
    full = stacks.stacks("full", 0)
    long = [each for each in full if each.steps >= stages.LONG]
    assert [each.steps for each in long] == [300_000] * 2
    sizes = []
    for each in long:
        codes = [encodings.width_of(run.encoding, 16, 16, 16) for run in each.runs]
        width = each.network.width
        one = (max(codes) + 16) * width + (each.network.depth - 1) * width**2 + 16 * width
        sizes += [2 * one] * len(codes)
    assert max(sizes) < 16 * 2**20
    assert sum(sizes) < 64 * 2**20
    teacher = [run for each in full if each.family == "hyperteacher" and each.steps < stages.LONG for run in each.runs]
    assert len([run for run in teacher if run.support != "non_compositional"]) >= 30


def test_correlations_are_known_ones() -> None:
    found = correlation([1, 2, 3, 4, 5, 6], [2, 4, 6, 8, 10, 100])
    assert found["spearman"] == pytest.approx(1)
    assert 0.6 < found["pearson"] < 1
    assert correlation([1, 1, 2, 2], [1, 2, 1, 2])["spearman"] == pytest.approx(0)
    x = torch.randn(200, generator=drawn()).tolist()
    y = [value + noise for value, noise in zip(x, torch.randn(200, generator=drawn(1)).tolist(), strict=True)]
    found = correlation(x, y)
    assert found["low"] < found["pearson"] < found["high"]
    from scipy import stats

    assert found["pearson"] == pytest.approx(stats.pearsonr(x, y)[0])
    assert found["spearman"] == pytest.approx(stats.spearmanr(x, y)[0])


@pytest.mark.gpu
def test_an_update_as_a_graph_trains_as_well_as_one_by_one() -> None:
    stack = dataclasses.replace(TOY, network=Mlp(32, 2), runs=(Run(), Run("language"), Run("invertible")))
    scores = []
    for device in ("cpu", "cuda"):
        trainer = Trainer(stack, device)
        trainer.advance(600)
        scores.append([row["held_out"]["score"] for row in measure(trainer, 256)])
    assert torch.allclose(torch.tensor(scores[0]), torch.tensor(scores[1]), atol=0.1)
    grid_stack = dataclasses.replace(stack, runs=(Run(),), family="grid", size=16)
    Trainer(grid_stack, "cuda").advance(20)
