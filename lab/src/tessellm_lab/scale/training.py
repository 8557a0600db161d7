"""A stack of runs trained side by side on data made on the device; on a GPU one update is one CUDA graph.

Runs of a stack share family, network and schedule, and differ in encoding, support, share held out and seed. Nothing
waits for the host inside the loop, so a run of hundreds of thousands of updates costs what its arithmetic costs. Stacks
of different networks go side by side too (`advance`), each on a stream of its own: small ones leave most of a GPU idle.

Shapes: E run, B task, S sample, M module, I code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic

import torch
from torch import Tensor

from ..common.finite import Watch, check
from ..common.stacked import Params
from . import encodings, tasks
from .encodings import FEWSHOT
from .grid import PreferenceGrid
from .networks import Network
from .tasks import MaskTable
from .teacher import Hyperteacher

WARM_UP = 500  # updates over which the rate grows again after a stop, since the optimiser's averages are not stored
LOOK_EVERY = 100  # updates between two looks at the clock and at what broke


@dataclass(frozen=True)
class Run:
    """What one run of a stack is."""

    encoding: str = "identity"
    support: str = "random"
    held_out: float = 0.25
    seed: int = 0


@dataclass(frozen=True)
class Stack:
    """Runs trained together."""

    name: str
    runs: tuple[Run, ...]
    network: Network
    steps: int
    family: str = "hyperteacher"  # or grid
    modules: int = 16
    most: int = 3
    size: int = 16  # inputs, hidden units and outputs of the teacher; features of the grid
    tasks: int = 128  # a batch
    rate: float = 3e-4
    decay: float = 3e-3
    latents: str = "discrete"
    dtype: torch.dtype = torch.float32
    beside: str = ""  # stacks of one such name train side by side on a GPU


class Trainer:
    """Parameters, data and optimiser of a stack."""

    def __init__(self, stack: Stack, device: str, as_graph: bool = True):
        self.stack, self.device, self.steps = stack, torch.device(device), 0
        seeds = [run.seed for run in stack.runs]
        masks = tasks.all_masks(stack.modules, stack.most)
        splits = [tasks.split(masks, run.support, run.held_out, run.seed) for run in stack.runs]
        self.train_masks, self.held_masks = (MaskTable(list(part), device) for part in zip(*splits, strict=True))
        self.trained_E = [len(train) for train, _ in splits]
        self.absent_EM = torch.stack([~train.any(0) for train, _ in splits])
        self.family: Hyperteacher | PreferenceGrid = (
            Hyperteacher.random(seeds, stack.modules, stack.most, stack.size, device)
            if stack.family == "hyperteacher"
            else PreferenceGrid.random(seeds, stack.modules, stack.size, device)
        )
        self.generator = torch.Generator(device=device).manual_seed(1 + seeds[0])
        sizes = (stack.modules, self.family.inputs, self.family.outputs)
        self.codes = [encodings.width_of(run.encoding, *sizes) for run in stack.runs]
        self.encode = [
            encodings.encoding(run.encoding, stack.modules, run.seed, device) if run.encoding != FEWSHOT else None
            for run in stack.runs
        ]
        start = stack.network.initialise(self.codes, self.family.inputs, self.family.outputs, self.generator)
        self.params: Params = {name: value.requires_grad_() for name, value in start.items()}
        self.watch = Watch(len(stack.runs), device)
        on_gpu = self.device.type == "cuda"
        self.as_graph = on_gpu and as_graph
        self.rate = torch.tensor(stack.rate, device=device)
        self.optimiser = torch.optim.AdamW(
            self.params.values(), lr=self.rate if on_gpu else stack.rate, weight_decay=stack.decay, fused=True,
            capturable=on_gpu,
        )  # fmt: skip
        self._stream = torch.cuda.Stream() if on_gpu else None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._resumed_at: int | None = None

    def draw(self, table: MaskTable, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Latents [E, B, M], codes [E, B, I], samples and targets of fresh tasks."""
        z_EBM = tasks.latents(table.draw(count, generator), self.stack.latents, generator)
        x, target = self.family.draw(z_EBM, generator)
        return z_EBM, self.code(z_EBM, generator), x, target

    def code(self, z_EBM: Tensor, generator: torch.Generator) -> Tensor:
        """Every run's own encoding, zeros behind it up to the widest: [E, B, I]."""
        rows = []
        for run, encode in enumerate(self.encode):
            code_BI = encode(z_EBM[run]) if encode is not None else self._shots(run, z_EBM[run], generator)
            rows.append(torch.nn.functional.pad(code_BI, (0, max(self.codes) - code_BI.shape[-1])))
        return torch.stack(rows)

    def _shots(self, run: int, z_BM: Tensor, generator: torch.Generator) -> Tensor:
        """Fresh inputs of each task with their outputs, in a row: [B, I]."""
        assert isinstance(self.family, Hyperteacher), "the few-shot encoding shows a teacher's behaviour"
        return torch.cat(self.family.only(run).draw(z_BM[None], generator, encodings.SHOTS), -1)[0].flatten(1)

    def update(self) -> None:
        """One step of every run; each gets exactly its own gradient, since the loss is a sum over runs."""
        self.optimiser.zero_grad(set_to_none=True)
        _, code, x, target = self.draw(self.train_masks, self.stack.tasks, self.generator)
        output = self.stack.network(self.params, code, x, self.stack.dtype)
        loss_E = self.family.loss(output, target)
        self.watch.see(loss_E)
        loss_E.sum().backward()
        self.optimiser.step()

    def advance(self, steps: int, deadline: float = float("inf")) -> bool:
        """Train up to `steps` in all; False if the deadline (of the monotonic clock) came first."""
        return advance([self], steps, deadline)

    def resume(self, params: Params, steps: int) -> None:
        """Go on from stored parameters. The rate grows anew, since the optimiser's averages start at zero."""
        with torch.no_grad():
            for name, value in params.items():
                self.params[name].copy_(value)
        self.steps = self._resumed_at = steps
        self.watch.restart(steps)
        self.set_rate(1 / WARM_UP)

    def set_rate(self, share: float) -> None:
        rate = self.stack.rate * min(1.0, share)
        if self.device.type == "cuda":
            self.rate.fill_(rate)
        else:
            self.optimiser.param_groups[0]["lr"] = rate

    def step(self) -> None:
        """One update; on a GPU it is asked for, not waited for."""
        with torch.cuda.stream(self._stream):  # None: nothing changes
            if self._graph is not None:
                self._graph.replay()
            else:
                self.update()
            self.steps += 1
            if self._resumed_at is not None:
                since = self.steps - self._resumed_at
                self.set_rate(since / WARM_UP)
                self._resumed_at = None if since >= WARM_UP else self._resumed_at

    def look(self, last: bool = False) -> None:
        """Wait for the device; runs that broke are an error."""
        if self._stream is not None:
            self._stream.synchronize()

        def describe(run: int) -> str:
            return f"run {run} of stack {self.stack.name!r} ({self.stack.runs[run]})"

        given = {
            f"the family's {name}": value for name, value in vars(self.family).items() if isinstance(value, Tensor)
        }
        check(self.watch, self.params | given, describe, last)

    def is_broken(self) -> bool:
        return bool(self.watch.broken()) or not all(bool(value.isfinite().all()) for value in self.params.values())

    def prepare(self) -> None:
        """Let the stream begin after all that was asked for before, and make the graph, if there is to be one. The
        updates that warm it up are undone."""
        if self._stream is None:
            return
        torch.cuda.synchronize()
        if not self.as_graph or self._graph is not None:
            return
        kept = {name: value.detach().clone() for name, value in self.params.items()}
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            for _ in range(3):
                self.update()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.generator)
        with torch.cuda.graph(graph, stream=self._stream):  # a stream of its own has workspaces of its own
            self.update()
        with torch.no_grad():
            for name, value in kept.items():
                self.params[name].copy_(value)
            for state in self.optimiser.state.values():
                for value in state.values():
                    value.zero_()
        self.watch.restart(self.steps)
        torch.cuda.synchronize()
        self._graph = graph


def advance(trainers: Sequence[Trainer], steps: int, deadline: float = float("inf")) -> bool:
    """Train several stacks side by side up to `steps` in all; False if the deadline came first."""
    for trainer in trainers:
        trainer.prepare()
    done = trainers[0].steps
    while done < steps:
        if done % LOOK_EVERY == 0:
            for trainer in trainers:
                trainer.look()
            if monotonic() > deadline:
                return False
        for trainer in trainers:
            trainer.step()
        done += 1
    for trainer in trainers:
        trainer.look(last=True)
    return True
