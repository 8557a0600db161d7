"""Runs in a stack do not touch each other; what they learn is measured."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tessellm_lab.common.finite import TrainingError
from tessellm_lab.scale import experiment, stacks, stages
from tessellm_lab.scale.measure import decode, measure
from tessellm_lab.scale.networks import Mlp, Transformer
from tessellm_lab.scale.training import Run, Trainer, advance

from scale_cases import TOY, drawn, toys


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


def test_stacks_side_by_side_learn_what_each_learns_alone() -> None:
    stack = dataclasses.replace(TOY, name="other", network=Mlp(12, 1))
    together = [Trainer(TOY, "cpu"), Trainer(stack, "cpu")]
    assert advance(together, 30)
    for trainer in together:
        alone = Trainer(trainer.stack, "cpu")
        alone.advance(30)
        assert all(torch.equal(alone.params[name], value) for name, value in trainer.params.items())


def test_a_run_that_breaks_is_named_with_its_update_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tessellm_lab.scale.training.LOOK_EVERY", 5)
    other = dataclasses.replace(TOY, name="other", beside="same")
    stack = dataclasses.replace(TOY, beside="same")
    real = Trainer.update

    def struck(trainer: Trainer) -> None:
        real(trainer)
        if trainer.stack.name == "toy" and int(trainer.watch.updates) == 12:
            with torch.no_grad():
                trainer.params["1"][1, 0, 0] = torch.nan

    monkeypatch.setattr(Trainer, "update", struck)
    with pytest.raises(TrainingError, match=r"run 1 of stack 'toy' \(Run.*seed=1\)\) broke at update 13 .*now: .*1"):
        Trainer(stack, "cpu").advance(40)
    said: list[str] = []
    monkeypatch.setattr(stages, "groups", lambda wanted, device: [wanted])
    state = stages.train_stacks([stack, other], tmp_path, "cpu", float("inf"), said.append)
    assert state.rows(stack) is None
    assert state.rows(other) is not None
    assert "broke at update 13" in said[0]
    assert stages.State(tmp_path).broken == [said[0]]


def test_hidden_layers_that_are_not_finite_are_named() -> None:
    trainer = Trainer(TOY, "cpu")
    with torch.no_grad():
        trainer.params["bias.1"][0, 3] = torch.inf
    with pytest.raises(TrainingError, match=r"run 0 of stack 'toy' .*layer 1 gives values that are not finite"):
        measure(trainer, 128)
    with pytest.raises(TrainingError, match=r"run 0 .*parameters not finite now: bias\.1"):
        trainer.look(last=True)


def test_small_stacks_go_side_by_side_on_a_gpu_and_alone_on_a_cpu() -> None:
    full = stacks.stacks("full", 0)
    assert [len(group) for group in stages.groups(full, "cuda")] == [12, 1, 1]
    assert {len(group) for group in stages.groups(full, "cpu")} == {1}


def test_the_experiment_runs_at_a_toy_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment, "stacks", toys)
    monkeypatch.setattr("tessellm_lab.scale.stacks.SHARES", (0.5,))
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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_as_a_graph_trains_as_well_as_one_by_one(dtype: torch.dtype) -> None:
    runs = (Run(), Run("language"), Run("fewshot"))
    stack = dataclasses.replace(TOY, network=Mlp(32, 2), runs=runs, dtype=dtype)
    scores = []
    for device, as_graph in (("cpu", False), ("cuda", False), ("cuda", True)):
        trainer = Trainer(stack, device, as_graph)
        trainer.advance(600)
        scores.append([row["held_out"]["score"] for row in measure(trainer, 256)])
    assert torch.allclose(torch.tensor(scores[0]), torch.tensor(scores[1]), atol=0.1)
    assert torch.allclose(torch.tensor(scores[0]), torch.tensor(scores[2]), atol=0.1)


@pytest.mark.gpu
def test_the_full_size_stacks_train_side_by_side_on_a_gpu() -> None:
    small = [each for each in stacks.stacks("full", 0) if each.beside]
    trainers = [Trainer(stack, "cuda") for stack in small]
    before = [[row["held_out"]["score"] for row in measure(trainer, 128)] for trainer in trainers]
    assert advance(trainers, 1000)
    for trainer, first in zip(trainers, before, strict=True):
        scores = [row["held_out"]["score"] for row in measure(trainer, 256)]
        assert sum(scores) > sum(first), trainer.stack.name
