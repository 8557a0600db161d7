"""What calls of the scale experiment leave for the next one: few files, so that they are easily carried.

`state.json` holds the rows of every finished stack, the curve of a stopped one, what broke and how long it took. The
weights of a stopped stack are in half precision, its runs in a row, cut into files of at most 16 MiB named by the step
that they belong to: files of an older step stay until `state.json` names the new ones.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tessellm.files import new_file, stored, write_text

from ..common.finite import TrainingError
from ..common.stopwatch import Stopwatch
from .training import Stack, Trainer

PART = (16 * 2**20 - 2**16) // 2  # numbers in a file: 16 MiB, a little left for its header
Rows = list[dict[str, Any]]


class State:
    """A folder's content."""

    def __init__(self, folder: Path):
        self.folder, self.path = folder, folder / "state.json"
        self.finished: dict[str, dict[str, Any]] = {}
        self.stopped: dict[str, dict[str, Any]] = {}
        self.broken: list[str] = []
        self.stopwatch = Stopwatch()
        if self.path.is_file():
            with stored(self.path):
                content = json.loads(self.path.read_text(encoding="utf-8"))
                self.finished, self.stopped = dict(content["finished"]), dict(content["stopped"])
                self.broken = list(content["broken"])
                self.stopwatch = Stopwatch(float(content.get("seconds", 0.0)))  # older states lack it

    def begun(self, stack: Stack) -> bool:
        """Whether something of exactly this one is here."""
        with stored(self.path):
            kept = (found.get(stack.name) for found in (self.finished, self.stopped))
            return any(found is not None and found["stack"] == str(stack) for found in kept)

    def rows(self, stack: Stack) -> Rows | None:
        """A finished stack's, if it was exactly this one."""
        with stored(self.path):
            found = self.finished.get(stack.name)
            return found["rows"] if found is not None and found["stack"] == str(stack) else None

    def finish(self, stack: Stack, rows: Rows) -> None:
        self.finished[stack.name] = {"stack": str(stack), "rows": rows}
        self.stopped.pop(stack.name, None)
        self.write()

    def note(self, broken: str) -> None:
        self.broken.append(broken)
        self.write()

    def stop(self, trainer: Trainer, curve: Rows) -> None:
        """Keep a stack that is not done yet."""
        name, values = trainer.stack.name, torch.cat(_flat(trainer)).half().cpu()
        if not bool(values.isfinite().all()):
            raise TrainingError(f"stack {name!r} has weights that half precision cannot hold at step {trainer.steps}")
        parts = values.split(PART)
        for number, part in enumerate(parts):
            with new_file(self.folder / _file(name, trainer.steps, number)) as file:
                save_file({"values": part.contiguous()}, file)
        self.stopped[name] = {
            "stack": str(trainer.stack), "step": trainer.steps, "parts": len(parts), "curve": curve
        }  # fmt: skip
        self.write()

    def resume(self, trainer: Trainer) -> Rows:
        """Continue a stopped stack, if there is one of exactly this kind; its curve."""
        with stored(self.path):
            found = self.stopped.get(trainer.stack.name)
            if found is None or found["stack"] != str(trainer.stack):
                return []
            step, count, curve = int(found["step"]), int(found["parts"]), list(found["curve"])
        anew = f"Remove the folder {self.folder} to train all of it anew"
        parts = []
        for number in range(count):
            path = self.folder / _file(trainer.stack.name, step, number)
            with stored(path, anew):
                parts.append(load_file(path)["values"])
        with stored(self.path, anew):
            trainer.resume(_shaped(trainer, torch.cat(parts).float()), step)
        return curve

    def write(self) -> None:
        content = {
            "finished": self.finished, "stopped": self.stopped, "broken": self.broken,
            "seconds": self.stopwatch.seconds,
        }  # fmt: skip
        write_text(self.path, json.dumps(content) + "\n")
        counts = [(name, found["step"], found["parts"]) for name, found in self.stopped.items()]
        named = {_file(name, step, number) for name, step, parts in counts for number in range(parts)}
        for path in self.folder.glob("*.safetensors"):
            if path.name not in named:
                path.unlink()


def _file(name: str, step: int, number: int) -> str:
    return f"{name}-{step}.{number}.safetensors"


def _used(trainer: Trainer, run: int) -> list[tuple[str, Tensor]]:
    """A run's parameters by name; of the code's, those that its own encoding reaches."""
    return [(name, value[run, : trainer.codes[run]] if name == "code" else value[run])
            for name, value in trainer.params.items()]  # fmt: skip


def _flat(trainer: Trainer) -> list[Tensor]:
    runs = range(len(trainer.stack.runs))
    return [value.detach().flatten() for run in runs for _, value in _used(trainer, run)]


def _shaped(trainer: Trainer, values: Tensor) -> dict[str, Tensor]:
    """The stack's parameters from what `_flat` made; what no encoding reaches stays as it is."""
    made = {name: value.detach().clone() for name, value in trainer.params.items()}
    sizes = [part.numel() for part in _flat(trainer)]
    if sum(sizes) != values.numel():
        raise ValueError(f"expected {sum(sizes)} numbers, found {values.numel()}")
    parts = iter(values.split(sizes))
    for run in range(len(trainer.stack.runs)):
        for name, value in _used(trainer, run):
            made[name][run, : value.shape[0]] = next(parts).view(value.shape).to(value.device)
    return made
