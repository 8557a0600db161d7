"""A stack of runs trained side by side on data made on the device; on a GPU one update is one CUDA graph.

Runs of a stack share family, network and schedule, and differ in encoding, support, share held out and seed. Nothing
waits for the host inside the loop, so a run of hundreds of thousands of updates costs what its arithmetic costs.

Shapes: E run, B task, S sample, M module, I code.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic

import torch
from torch import Tensor

from ..stacked import Params
from . import encodings, tasks
from .encodings import FEWSHOT
from .grid import PreferenceGrid
from .networks import Network
from .tasks import MaskTable
from .teacher import Hyperteacher

WARM_UP = 500  # updates over which the rate grows again after a stop, since the optimiser's averages are not stored
LOOK_EVERY = 100  # updates between two looks at the clock


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


class Trainer:
    """Parameters, data and optimiser of a stack."""

    def __init__(self, stack: Stack, device: str):
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
        on_gpu = self.device.type == "cuda"
        self.rate = torch.tensor(stack.rate, device=device)
        self.optimiser = torch.optim.AdamW(
            self.params.values(), lr=self.rate if on_gpu else stack.rate, weight_decay=stack.decay, fused=True,
            capturable=on_gpu,
        )  # fmt: skip
        self._graph: torch.cuda.CUDAGraph | None = None
        self._resumed = False

    def draw(self, table: MaskTable, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Latents [E, B, M], codes [E, B, I], samples and targets of fresh tasks."""
        z_EBM = tasks.latents(table.draw(count, generator), self.stack.latents, generator)
        x, target = self.family.draw(z_EBM, generator)
        return z_EBM, self.code(z_EBM, generator), x, target

    def code(self, z_EBM: Tensor, generator: torch.Generator) -> Tensor:
        """Every run's own encoding, zeros behind it up to the widest: [E, B, I]."""
        rows = []
        for run, encode in enumerate(self.encode):
            code_BI = encode(z_EBM[run]) if encode is not None else self._shots(z_EBM, generator)[run]
            rows.append(torch.nn.functional.pad(code_BI, (0, max(self.codes) - code_BI.shape[-1])))
        return torch.stack(rows)

    def _shots(self, z_EBM: Tensor, generator: torch.Generator) -> Tensor:
        """Fresh inputs of each task with their outputs, in a row: [E, B, I]."""
        assert isinstance(self.family, Hyperteacher), "the few-shot encoding shows a teacher's behaviour"
        return torch.cat(self.family.draw(z_EBM, generator, encodings.SHOTS), -1).flatten(2)

    def update(self) -> None:
        """One step of every run; each gets exactly its own gradient, since the loss is a sum over runs."""
        self.optimiser.zero_grad(set_to_none=True)
        _, code, x, target = self.draw(self.train_masks, self.stack.tasks, self.generator)
        output = self.stack.network(self.params, code, x, self.stack.dtype)
        self.family.loss(output, target).sum().backward()
        self.optimiser.step()

    def advance(self, steps: int, deadline: float = float("inf")) -> bool:
        """Train up to `steps` in all; False if the deadline (of the monotonic clock) came first."""
        started_at = self.steps
        while self.steps < steps:
            if self.steps % LOOK_EVERY == 0:
                if self.device.type == "cuda":
                    torch.cuda.synchronize()
                if monotonic() > deadline:
                    return False
            self._step()
            self.steps += 1
            if self._resumed and self.steps - started_at <= WARM_UP:
                self.set_rate((self.steps - started_at) / WARM_UP)
        self._resumed = False
        return True

    def resume(self, params: Params, steps: int) -> None:
        """Go on from stored parameters. The rate grows anew, since the optimiser's averages start at zero."""
        with torch.no_grad():
            for name, value in params.items():
                self.params[name].copy_(value)
        self.steps, self._resumed = steps, True
        self.set_rate(1 / WARM_UP)

    def set_rate(self, share: float) -> None:
        rate = self.stack.rate * min(1.0, share)
        if self.device.type == "cuda":
            self.rate.fill_(rate)
        else:
            self.optimiser.param_groups[0]["lr"] = rate

    def _step(self) -> None:
        if self.device.type != "cuda":
            self.update()
            return
        if self._graph is None:
            self._graph = self._captured()
        self._graph.replay()

    def _captured(self) -> torch.cuda.CUDAGraph:
        """One update as a graph. The updates that warm it up are undone."""
        kept = {name: value.detach().clone() for name, value in self.params.items()}
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.update()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.generator)
        with torch.cuda.graph(graph):
            self.update()
        with torch.no_grad():
            for name, value in kept.items():
                self.params[name].copy_(value)
            for state in self.optimiser.state.values():
                for value in state.values():
                    value.zero_()
        return graph
