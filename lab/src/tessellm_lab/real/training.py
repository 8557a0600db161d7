"""Training of several LoRA adapters of one model at once: the loop, its optimiser, and what it keeps.

At every evaluation an adapter that got better is written as PEFT's folder, and the state beside it: a run that was
cut off has its adapters, and the same command goes on from there. Knows token ids; nothing of skills.

Shapes: G group (one job), P all parameters of one group, R rows of a group, T time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from tessellm.errors import CheckpointError, TessellmError
from tessellm.evaluate.journal import key_of
from tessellm.files import new_file, stored

from ..common.finite import Watch, check
from ..common.stopwatch import Stopwatch
from .grouped_lora import LoraGroups
from .packing import IGNORED, LABEL, Stream, Text, pack
from .peft_files import BASE, Facts, write_adapter

STATE = "training.safetensors"
Log = Callable[[str], None]


@dataclass(frozen=True)
class Job:
    """One adapter to be trained."""

    name: str
    train: Sequence[Text]
    dev: Sequence[Text]
    steps: int
    seed: int = 0

    @property
    def folder(self) -> str:
        return f"{self.name}-{self.seed}"


@dataclass(frozen=True)
class Settings:
    """How all of them are trained."""

    rows: int = 8
    length: int = 512
    learning_rate: float = 2e-3
    rank: int = 8
    alpha: float = 16
    every: int = 50  # steps between evaluations; the end of a job is one too
    dev_rows: int = 16
    warmup: int = 30
    compiled: bool = False

    def __post_init__(self) -> None:
        for name in ("rows", "length", "rank", "every", "dev_rows"):
            if getattr(self, name) < 1:
                raise TessellmError(f"{name} must be at least 1; got {getattr(self, name)}")


@dataclass
class Progress:
    """Where a training is: what the state's file holds beside tensors."""

    step: int = 0
    seconds: float = 0.0
    base_G: list[float] = field(default_factory=list)  # the base's nats per token, before the first step
    best_G: list[float] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)


class Adam:
    """AdamW without decay on [G, P], a learning rate per group, gradients clipped per group."""

    def __init__(self, groups: LoraGroups, clip: float = 1.0, betas: tuple[float, float] = (0.9, 0.99)):
        self.groups, self.clip, self.betas, self.count = groups, clip, betas, 0
        self.mean_GP, self.square_GP = (torch.zeros_like(groups.values_GP) for _ in range(2))

    @torch.no_grad()
    def step(self, rate_G: Tensor) -> None:
        """Move all matrices along their gradients."""
        gradient_GP, (first, second) = self.groups.take_gradient(), self.betas
        norm_G1 = gradient_GP.norm(dim=1, keepdim=True)
        gradient_GP.mul_((self.clip / (norm_G1 + 1e-6)).clamp(max=1.0))
        self.count += 1
        self.mean_GP.lerp_(gradient_GP, 1 - first)
        self.square_GP.mul_(second).addcmul_(gradient_GP, gradient_GP, value=1 - second)
        scale_GP = (self.square_GP / (1 - second**self.count)).sqrt_().add_(1e-8)
        self.groups.move((self.mean_GP / scale_GP).mul_(-rate_G[:, None] / (1 - first**self.count)))


def rates(jobs: Sequence[Job], settings: Settings, step: int) -> Tensor:
    """Learning rates [G]: warm up, then half a cosine to 0 at the end of each job."""
    found = []
    for job in jobs:
        warm = min(1.0, (step + 1) / max(1, min(settings.warmup, job.steps // 5)))
        found.append(settings.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * min(1.0, step / job.steps))))
    return torch.tensor(found)


class Training:
    """Jobs on one model, in one folder."""

    def __init__(self, model: Any, jobs: Sequence[Job], settings: Settings, out: Path, base: str = BASE):
        if not jobs or min(job.steps for job in jobs) < 1 or not all(job.train and job.dev for job in jobs):
            raise TessellmError("expected at least one adapter to train, each with texts and at least one step")
        self.jobs, self.settings, self.out, self.base = jobs, settings, out, base
        self.device = next(model.parameters()).device
        self.groups = LoraGroups(model, [job.seed for job in jobs], settings.rank, settings.alpha)
        self.adam, self.progress = Adam(self.groups), Progress()
        self.dev_GR = torch.stack([_dev_rows(job.dev, settings) for job in jobs])  # [G, R, 4, T]
        self.watch = Watch(len(jobs), self.device)
        if settings.compiled:
            _compile(model)

    @property
    def steps(self) -> int:
        return max(job.steps for job in self.jobs)

    def run(self, log: Log = print) -> list[Facts]:
        """Train to the end, from the start or from where the folder's state is; the facts of the adapters kept."""
        self._resume(log)
        clock = Stopwatch(self.progress.seconds)
        if not self.progress.base_G:
            self.progress.base_G = self.dev_nats()
            self.progress.best_G = list(self.progress.base_G)
            log(f"step 0: {self._told(self.progress.base_G)}")
        streams = self._streams()
        rows = self._rows(streams)
        for step in range(self.progress.step, self.steps):
            nats_G, count_G = self.groups.losses(self._there(rows))
            loss_G = nats_G / count_G.clamp(min=1)
            self.watch.see(loss_G.detach())
            loss_G.sum().backward()
            self.adam.step(rates(self.jobs, self.settings, step).to(self.device))
            rows = self._rows(streams)  # while the device works
            if self._is_evaluated(step + 1):
                self._evaluate(step + 1, streams, clock, log)
        return [self._facts(group, streams[group].epoch) for group in range(len(self.jobs))]

    def _is_evaluated(self, step: int) -> bool:
        return step % self.settings.every == 0 or step in {job.steps for job in self.jobs}

    def _streams(self) -> list[Stream]:
        streams = [Stream(job.train, self.settings.length, job.seed) for job in self.jobs]
        for stream in streams:
            stream.skip(self.progress.step * self.settings.rows)
        return streams

    def _rows(self, streams: Sequence[Stream]) -> Tensor:
        rows = torch.cat([stream.take(self.settings.rows) for stream in streams])
        return rows.pin_memory() if self.device.type == "cuda" else rows

    def _there(self, rows: Tensor) -> Tensor:
        return rows.to(self.device, non_blocking=True)

    @torch.no_grad()
    def dev_nats(self) -> list[float]:
        """Nats per answer token of each job's development rows."""
        totals = []
        for part in self.dev_GR.split(self.settings.rows, 1):
            totals.append(torch.stack(self.groups.losses(self._there(part.flatten(0, 1)))).double())
        nats_G, count_G = torch.stack(totals).sum(0)
        return (nats_G / count_G.clamp(min=1)).tolist()

    def _evaluate(self, step: int, streams: Sequence[Stream], clock: Stopwatch, log: Log) -> None:
        check(self.watch, {"adapter": self.groups.values_GP}, lambda group: self.jobs[group].folder, step == self.steps)
        dev_G = self.dev_nats()
        self.progress.step, self.progress.seconds = step, clock.seconds
        self.progress.history.append({"step": step, "seconds": round(clock.seconds, 1), "dev": dev_G})
        for group, (nats, best) in enumerate(zip(dev_G, self.progress.best_G, strict=True)):
            if nats < best:
                self.progress.best_G[group] = nats
                facts = self._facts(group, streams[group].epoch)
                write_adapter(self.out / self.jobs[group].folder, self.groups.tensors(group), facts)
        self._save()
        log(f"step {step} of {self.steps}, {clock.seconds:.0f} s: {self._told(dev_G)}")

    def _told(self, dev_G: Sequence[float]) -> str:
        shown = (f"{job.folder} {nats:.3f}" for job, nats in zip(self.jobs, dev_G, strict=True))
        return f"nats per token on dev: {', '.join(shown)}"

    def _facts(self, group: int, epochs: int) -> Facts:
        job, own = self.jobs[group], self.settings
        best, base = self.progress.best_G[group], self.progress.base_G[group]
        return Facts(
            job.name, job.seed, job.steps, epochs, own.rows, own.length, own.rank, own.alpha, own.learning_rate, best,
            base, self.base,
        )  # fmt: skip

    @property
    def _identity(self) -> str:
        """What has to be the same for a state to be gone on from."""
        jobs = [(job.name, job.seed, job.steps, len(job.train), len(job.dev), job.train[:2]) for job in self.jobs]
        return key_of(jobs, {**asdict(self.settings), "compiled": None}, self.base)

    def _save(self) -> None:
        tensors = {"values": self.groups.values_GP, "mean": self.adam.mean_GP, "square": self.adam.square_GP}
        facts = {"identity": self._identity, "progress": json.dumps(asdict(self.progress))}
        with new_file(self.out / STATE) as path:
            save_file({name: tensor.cpu() for name, tensor in tensors.items()}, path, facts)

    @torch.no_grad()
    def _resume(self, log: Log) -> None:
        path = self.out / STATE
        if not path.is_file():
            return
        with stored(path, "Remove it to train anew"), safe_open(path, "pt") as file:
            facts = file.metadata() or {}
            if facts["identity"] != self._identity:
                raise CheckpointError(f"{path} is the state of another training. Remove it, or choose another --out")
            self.progress = Progress(**json.loads(facts["progress"]))
            self.groups.set(file.get_tensor("values"))
            self.adam.mean_GP.copy_(file.get_tensor("mean"))
            self.adam.square_GP.copy_(file.get_tensor("square"))
        self.adam.count = self.progress.step
        self.watch.restart(self.progress.step)
        log(f"going on from step {self.progress.step} of {path}")


def _dev_rows(texts: Sequence[Text], settings: Settings) -> Tensor:
    """The first development rows, as many for every job: missing ones count nothing."""
    rows = pack(texts, settings.length, torch.Generator().manual_seed(0))[: settings.dev_rows]
    count = -(-settings.dev_rows // settings.rows) * settings.rows
    repeated = rows[torch.arange(count) % len(rows)].clone()
    repeated[len(rows) :, LABEL] = IGNORED
    return repeated


def _compile(model: Any) -> None:
    """Each layer by itself: an eager step is bound by launches."""
    torch._dynamo.config.recompile_limit = 64
    for layer in model.model.layers:
        layer.compile(dynamic=False)
