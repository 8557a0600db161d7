"""Training stack after stack with a deadline: what is done is kept, what was stopped goes on in the next call.

A folder holds one JSON file a finished stack and, of a long one that was stopped, each run's weights in half precision
(a file a run, at most 16 MiB for a network of 1024 × 4) with the curve so far. Short stacks are not stopped: one that
would not end in time is left for the next call.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ...files import new_file, stored, write_text
from .measure import held_out_scores, measure
from .training import Stack, Trainer

LONG = 100_000  # steps from which on a stack is stored on the way
POINTS = 30  # of a long stack's curve
TRIAL = 300  # steps by which a short stack's time is estimated


def train_stacks(
    wanted: list[Stack], folder: Path, device: str, deadline: float, log: Callable[[str], None]
) -> dict[str, list[dict[str, Any]]]:
    """Rows of every stack that is finished, by the stack's name."""
    done: dict[str, list[dict[str, Any]]] = {}
    for stack in wanted:
        rows = _finished(stack, folder)
        if rows is None and monotonic() < deadline:
            began = monotonic()
            rows = _train(stack, folder, device, deadline, log)
            if rows is not None:
                best = ", ".join(f"{row['held_out']['score']:.3f}" for row in rows)
                log(f"{stack.name}: {len(rows)} runs, {monotonic() - began:.0f} s; held out {best}")
        if rows is not None:
            done[stack.name] = rows
    return done


def _train(
    stack: Stack, folder: Path, device: str, deadline: float, log: Callable[[str], None]
) -> list[dict[str, Any]] | None:
    trainer = Trainer(stack, device)
    curve: list[dict[str, Any]] = _restored(trainer, folder) if stack.steps >= LONG else []
    if stack.steps < LONG and deadline < float("inf"):
        began, trial = monotonic(), min(TRIAL, stack.steps)
        trainer.advance(trial)
        needed = (monotonic() - began) * (stack.steps / trial)
        if began + needed > deadline:
            log(f"{stack.name}: needs {needed:.0f} s; left for the next call")
            return None
    pause = max(1, stack.steps // POINTS) if stack.steps >= LONG else stack.steps
    while trainer.steps < stack.steps:
        in_time = trainer.advance(min(stack.steps, (trainer.steps // pause + 1) * pause), deadline)
        if stack.steps >= LONG:
            curve.append({"step": trainer.steps, "held_out": held_out_scores(trainer)})
            _store(trainer, curve, folder)
            log(f"{stack.name}, step {trainer.steps}: held out {curve[-1]['held_out']}")
        if not in_time:
            return None
    rows = measure(trainer)
    for number, row in enumerate(rows):
        row["curve"] = [[point["step"], point["held_out"][number]] for point in curve]
    write_text(folder / f"{stack.name}.json", json.dumps({"stack": str(stack), "rows": rows}) + "\n")
    return rows


def _finished(stack: Stack, folder: Path) -> list[dict[str, Any]] | None:
    path = folder / f"{stack.name}.json"
    if not path.is_file():
        return None
    with stored(path):
        content = json.loads(path.read_text(encoding="utf-8"))
        return content["rows"] if content["stack"] == str(stack) else None


def _store(trainer: Trainer, curve: list[dict[str, Any]], folder: Path) -> None:
    name = trainer.stack.name
    for run in range(len(trainer.stack.runs)):
        kept = {key: value[run].detach().half().cpu().contiguous() for key, value in trainer.params.items()}
        with new_file(folder / f"{name}.{run}.safetensors") as file:
            save_file(kept, file)
    state = {"stack": str(trainer.stack), "step": trainer.steps, "curve": curve}
    write_text(folder / f"{name}.state.json", json.dumps(state) + "\n")


def _restored(trainer: Trainer, folder: Path) -> list[dict[str, Any]]:
    """Continue a stored stack, if there is one of exactly this kind; its curve."""
    path = folder / f"{trainer.stack.name}.state.json"
    if not path.is_file():
        return []
    with stored(path):
        state = json.loads(path.read_text(encoding="utf-8"))
        if state["stack"] != str(trainer.stack):
            return []
        step, curve = state["step"], state["curve"]
    runs = []
    for run in range(len(trainer.stack.runs)):
        weights = folder / f"{trainer.stack.name}.{run}.safetensors"
        with stored(weights):
            found = load_file(weights)
            runs.append({key: found[key] for key in trainer.params})
    trainer.resume({key: torch.stack([run[key] for run in runs]).float() for key in trainer.params}, step)
    return curve
