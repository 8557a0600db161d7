"""Runs of scale that are stopped: what is kept, what goes on, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from tessellm.errors import CheckpointError
from tessellm_lab.scale import encodings, experiment, stacks, stages
from tessellm_lab.scale.state import PART, State
from tessellm_lab.scale.training import Run, Trainer

from scale_cases import TOY, toys


def test_a_stopped_stack_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "LONG", 30)
    monkeypatch.setattr(stages, "POINTS", 4)
    monkeypatch.setattr("tessellm_lab.scale.training.LOOK_EVERY", 5)
    monkeypatch.setattr("tessellm_lab.scale.state.PART", 100)
    said: list[str] = []
    real = time.monotonic
    ticks = iter(range(10_000))
    monkeypatch.setattr("tessellm_lab.scale.training.monotonic", lambda: next(ticks))
    monkeypatch.setattr(stages, "monotonic", lambda: 0)
    assert stages.train_stacks([TOY], tmp_path, "cpu", 4, said.append).rows(TOY) is None
    stopped = json.loads((tmp_path / "state.json").read_text())["stopped"]["toy"]
    assert 0 < stopped["step"] < TOY.steps
    parts = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert parts == [f"toy-{stopped['step']}.{number}.safetensors" for number in range(stopped["parts"])]
    assert len(parts) > 1
    short, anew = save({"values": torch.zeros(3, dtype=torch.half)}), f"Remove the folder {tmp_path}"
    cut = {name: (tmp_path / name).read_bytes()[:60] for name in ("state.json", parts[1])}
    for name, damaged, told in (
        ("state.json", cut["state.json"], "state.json is damaged, or another version's. Remove it"),
        (parts[1], cut[parts[1]], f"{parts[1]} is damaged, or another version's. {anew}"),
        (parts[1], short, f"state.json is damaged, or another version's. {anew}"),  # says that there were more
        (parts[1], None, f"{parts[1]} is damaged, or another version's. {anew}"),
    ):
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).unlink()
        if damaged is not None:
            (tmp_path / name).write_bytes(damaged)
        with pytest.raises(CheckpointError, match=told):
            stages.train_stacks([TOY], tmp_path, "cpu", 4, said.append)
        (tmp_path / name).write_bytes(whole)
    monkeypatch.setattr("tessellm_lab.scale.training.monotonic", real)
    rows = stages.train_stacks([TOY], tmp_path, "cpu", real() + 100, said.append).rows(TOY)
    assert rows is not None
    assert rows[0]["steps"] == TOY.steps
    steps = [step for step, _ in rows[0]["curve"]]
    assert steps == sorted(set(steps))
    assert steps[0] <= stopped["step"] <= steps[-1] == TOY.steps
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]
    again = stages.train_stacks([TOY], tmp_path, "cpu", real() + 100, said.append).rows(TOY)
    assert again == json.loads(json.dumps(rows))  # read, not trained
    (tmp_path / "state.json").write_text('{"rows": []}')
    with pytest.raises(CheckpointError, match=r"state\.json is damaged, or another version's"):
        stages.train_stacks([TOY], tmp_path, "cpu", real() + 100, said.append)


def test_a_file_in_the_place_of_the_state_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".scale-state").write_text("mine")
    with pytest.raises(CheckpointError, match=r"\.scale-state cannot be a folder"):
        experiment.run(0, tmp_path, "cpu")
    assert (tmp_path / ".scale-state").read_text() == "mine"


def test_what_was_stopped_is_kept_in_half_precision_and_as_far_as_its_encodings_reach(tmp_path: Path) -> None:
    stack = dataclasses.replace(TOY, runs=(Run(), Run("language"), Run("fewshot")))
    first, second = Trainer(stack, "cpu"), Trainer(stack, "cpu")
    first.advance(20)
    State(tmp_path).stop(first, [{"step": 20, "held_out": [0.0, 0.0, 0.0]}])
    assert State(tmp_path).resume(second)[0]["step"] == second.steps == 20
    for run, width in enumerate(first.codes):
        for name, value in first.params.items():
            reached = slice(width) if name == "code" else slice(None)
            assert torch.equal(value[run, reached].half(), second.params[name][run, reached].half()), name
    kept = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert kept < 2 * sum(value.numel() for value in first.params.values())  # short codes are not padded


def test_short_stacks_that_would_not_end_in_time_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "TRIAL", 2)
    said: list[str] = []
    slow = dataclasses.replace(TOY, steps=90_000)
    assert stages.train_stacks([slow], tmp_path, "cpu", time.monotonic() + 0.5, said.append).rows(slow) is None
    assert "left for the next call" in said[0]


def test_resuming_restores_the_weights() -> None:
    first, second = Trainer(TOY, "cpu"), Trainer(TOY, "cpu")
    first.advance(20)
    second.resume({name: value.detach() for name, value in first.params.items()}, 20)
    assert all(torch.equal(first.params[name], second.params[name]) for name in first.params)
    second.advance(40)
    assert second.steps == 40


def test_a_run_that_was_interrupted_says_that_it_goes_on_and_how_long_it_took_in_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, said = tmp_path / ".scale-state", list[str]()
    monkeypatch.setattr(experiment, "stacks", lambda size, seed: toys(size, seed)[:3])
    monkeypatch.setattr("tessellm_lab.common.stopwatch.monotonic", lambda: 10.0 * len(said))  # a line takes so long

    def interrupted(text: str) -> None:
        said.append(text)
        if len(said) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as stop:
        experiment.run(0, tmp_path, "cpu", interrupted)
    assert stop.value.__notes__ == [f"what is done is kept in {folder}: run the same command again to go on"]
    kept = json.loads((folder / "state.json").read_text())
    assert kept["seconds"] == 10  # until the second stack was kept
    said.clear()
    again = experiment.run(0, tmp_path, "cpu", said.append)
    assert said[0] == f"going on from {folder}; remove it to begin anew"
    assert len(said) == 2
    assert again.seconds == 10 + 20
    for changes, seed, seconds, lines in (
        ({"seconds": 50.0}, 0, 50.0, 2),
        ({"seconds": 50.0}, 1, 0.0, 3),  # what is kept is another seed's
        ({}, 0, 0.0, 2),  # as older versions wrote it
    ):
        folder.mkdir()
        old = {name: kept[name] for name in ("finished", "stopped", "broken")}
        (folder / "state.json").write_text(json.dumps(old | changes))
        said.clear()
        assert experiment.run(seed, tmp_path, "cpu", said.append).seconds == seconds + 10 * lines
        assert len(said) == lines


def test_what_a_full_run_keeps_when_it_is_stopped_is_small() -> None:
    """At most three files of less than 16 MiB, for six encodings of the longest stack."""
    full = stacks.stacks("full", 0)
    (long,) = [each for each in full if each.steps >= stages.LONG]
    assert long.steps == 300_000
    assert [run.encoding for run in long.runs] == list(encodings.NAMES)
    codes = [encodings.width_of(run.encoding, 16, 16, 16) for run in long.runs]
    width, depth = long.network.width, long.network.depth
    values = sum((code + 16 + 16 + depth) * width + (depth - 1) * width**2 + 16 for code in codes)
    assert 2 * values < 48 * 2**20
    assert -(-values // PART) <= 3
    assert 2 * PART < 16 * 2**20
    teacher = [run for each in full if each.family == "hyperteacher" and each.steps < stages.LONG for run in each.runs]
    assert len([run for run in teacher if run.support != "non_compositional"]) >= 30
