"""GraphSteps: every decoding step is one CUDA graph, captured once for each bucket of rows and cells, then replayed.

Between steps the host only reads what was chosen a step ago, so the device never waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .compiled_rule import CompiledRule
from .device import SlotState
from .steps import Steps
from .voices import Special

if TYPE_CHECKING:
    from .drafts import Alone
    from .verification import Verification

SMALLEST_CELLS = 256


class GraphSteps(Steps):
    """Steps on a CUDA device. `compiled` compiles the rule, which is many small kernels otherwise."""

    def __init__(self, state: SlotState, context: int, compiled: bool):
        super().__init__(state, context)
        self.lag = 1
        self.graphs: dict[tuple[Any, ...], torch.cuda.CUDAGraph] = {}
        self.pool: Any = None
        if compiled:
            state.passes = CompiledRule(state.rule)

    def decode(self, rows: int, cells: int, how: str, special: Special | None = None) -> None:
        """A special pass is run as it is: which rows ask for what differs from step to step."""
        if special is not None:
            self.state.decode(self._rows(rows), self._cells(cells), how, special)
            return
        self._replay(self.state.decode, self._rows(rows), self._cells(cells), how)

    def draft(self, member: Alone, rows: int, length: int, cells: int, how: str) -> None:
        self._replay(member.draft, self._rows(rows), length, self._cells(cells), how)

    def verify(self, drafts: Verification, rows: int, length: int, cells: int, how: str) -> None:
        self._replay(drafts.verify, self._rows(rows), length, self._cells(cells), how)

    def _replay(self, step: Callable[..., None], *given: Any) -> None:
        """Run a step as the graph that it was captured as when it was first run so."""
        key = (step.__name__, *given)
        if key not in self.graphs:
            began = time.monotonic()
            self.graphs[key] = self._capture(step, *given)
            self.prepared_seconds += time.monotonic() - began
        self.graphs[key].replay()

    def _capture(self, step: Callable[..., None], *given: Any) -> torch.cuda.CUDAGraph:
        """A step as a graph. It is run before, to compile and choose what it needs; all that it changed is put back,
        except for cells of the caches, which the real step writes again."""
        before = [buffer.clone() for buffer in self.state.buffers]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                step(*given)
                for buffer, old in zip(self.state.buffers, before, strict=True):
                    buffer.copy_(old)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            step(*given)
        self.pool = self.pool or graph.pool()
        return graph

    def fetch(self, slots: Sequence[int]) -> Callable[[], tuple[list[int], list[float]]]:
        tokens, logprobs = (
            torch.empty(buffer.shape, dtype=buffer.dtype, pin_memory=True).copy_(buffer, non_blocking=True)
            for buffer in (self.state.token_S, self.state.logprob_S)
        )
        arrived = torch.cuda.Event()
        arrived.record()

        def wait() -> tuple[list[int], list[float]]:
            arrived.synchronize()
            return tokens[list(slots)].tolist(), logprobs[list(slots)].tolist()

        return wait

    def worth_moving(self, rows: int, needed: int) -> bool:
        return self._rows(needed) < self._rows(rows)

    def _rows(self, needed: int) -> int:
        return min(1 << (needed - 1).bit_length(), len(self.state.token_S))

    def _cells(self, needed: int) -> int:
        return min(self.context, max(SMALLEST_CELLS, 1 << (needed - 1).bit_length()))

    def on_device(self, part: Tensor) -> Tensor:
        return part.pin_memory().to(self.state.device, non_blocking=True)
