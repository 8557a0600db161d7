"""GraphSteps: every decoding step is one CUDA graph, captured once for each bucket of rows and cells, then replayed; so
is a pass over the end of a short prompt (prompt_graphs.py).

Between steps the host only reads what was chosen a step ago, so the device never waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..buffers import StepResult
from ..passes import Workspace, decode_step
from ..sampling import TokenChoice
from ..steps import DraftPass, Steps
from ..voices import SpecialRows
from .prompt_graphs import PromptGraphs, PromptRows, PromptShape, cut_into_buckets, padding_rows, split_rows

SMALLEST_CELLS = 256
TIMED = 3  # replays of a graph when it is new

GraphKey = tuple[Any, ...]  # the pass's name, then its shape


class GraphSteps(Steps):
    """Steps on a CUDA device. `few_shapes`: rather some rows more than another number of rows."""

    lag = 1

    def __init__(self, work: Workspace, context: int, few_shapes: bool):
        super().__init__(work, context)
        self.few_shapes = few_shapes
        self.graphs: dict[GraphKey, torch.cuda.CUDAGraph] = {}
        self.graph_seconds: dict[GraphKey, float] = {}  # the device's, per captured pass, when it was new
        self.pool: Any = None
        self._ready: dict[tuple[Any, ...], dict[int, float]] = {}
        self._staged: dict[tuple[Any, ...], Tensor] = {}
        self._arrived = torch.cuda.Event()
        self.prompts = PromptGraphs(work)

    def prefill(
        self,
        slots: Sequence[int],
        token_BT: Tensor,
        position_BT: Tensor,
        choice: TokenChoice,
        special: SpecialRows | None = None,
    ) -> None:
        """Replay short prompts' ends as graphs, where such shapes came before; run all else as it is."""
        graphable = choice is not TokenChoice.NONE and not special
        parts = cut_into_buckets(slots, token_BT, position_BT) if graphable else []
        shapes = [self._shape(part, choice) for part in parts]
        if parts and all(map(self.prompts.takes, parts)) and self.prompts.met(shapes):
            try:
                for part, shape in zip(parts, shapes, strict=True):
                    self.prompts.put(part, self.on_device)
                    self._replay("feed", self.prompts.feed, *shape)
                return
            except torch.OutOfMemoryError:  # graphs keep their memory; passes as they are give it back
                self.prompts.turn_off()
                torch.cuda.empty_cache()
        super().prefill(slots, token_BT, position_BT, choice, special)
        self.prompts.note(shapes)

    @torch.inference_mode()
    def ready_prompts(self, lengths: Sequence[int], choice: TokenChoice) -> None:
        """Capture passes over padding alone, which write to no slot's cells; _capture puts the rest back."""
        at_once = {rows for count in range(1, len(self.work.slots.token_S) + 1) for _, rows in split_rows(count)}
        for part in (padding_rows(rows, length) for length in lengths for rows in sorted(at_once)):
            if self.prompts.takes(part):
                self.prompts.put(part, self.on_device)
                self._known("feed", self.prompts.feed, *self._shape(part, choice))
                self.prompts.note([self._shape(part, choice)])

    def _shape(self, part: PromptRows, choice: TokenChoice) -> PromptShape:
        return part.rows, part.width, self.cells(part.stop), choice

    def decode(self, rows: int, cells: int, choice: TokenChoice, special: SpecialRows | None = None) -> None:
        """Replay a step; one with special rows is run as it is: which rows ask for what differs from step to step."""
        shape = self._rows(rows), self.cells(cells), choice
        if special is not None:
            decode_step(self.work, *shape, special)
        else:
            self._replay("decode", partial(decode_step, self.work), *shape)

    def run(self, name: str, run: DraftPass, rows: int, length: int, cells: int, choice: TokenChoice) -> None:
        self._replay(name, run, self._rows(rows), length, self.cells(cells), choice)

    def ready(
        self,
        passes: Mapping[str, DraftPass],
        empty: Callable[[], None],
        lengths: Sequence[int],
        rows: int,
        cells: int,
        choice: TokenChoice,
    ) -> dict[int, float]:
        """Capture passes of all lengths together, so that none is captured in the middle of a text."""
        bucket = self._rows(rows), self.cells(cells), self.cells(cells + max(lengths)), choice
        if bucket not in self._ready:
            empty()  # no cells but those of the next token are written
            step = self._rows(rows), self.cells(cells), choice
            seconds = {0: self._known("decode", partial(decode_step, self.work), *step)}
            for length in lengths:
                shape = self._rows(rows), length, self.cells(cells + length), choice
                seconds[length] = sum(self._known(name, run, *shape) for name, run in passes.items())
            self._ready[bucket] = seconds
        return self._ready[bucket]

    def _known(self, name: str, run: Callable[..., None], *shape: Any) -> float:
        """Look up the device's seconds for a pass; capture the pass if it was not."""
        key = (name, *shape)
        if key not in self.graphs:
            began = time.monotonic()
            self.graphs[key] = self._capture(key, partial(run, *shape))
            self.prepared_seconds += time.monotonic() - began
        return self.graph_seconds[key]

    def _replay(self, name: str, run: Callable[..., None], *shape: Any) -> None:
        """Run a pass as a graph, captured when that shape first comes."""
        self._known(name, run, *shape)
        self.graphs[name, *shape].replay()

    def _capture(self, key: GraphKey, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Capture a pass as a graph. Runs it before, to compile and choose what it needs, and times it after; puts back
        all that it changed, except for cells of the caches, which the real pass writes again."""
        before = [buffer.clone() for buffer in self.work.tensors]

        def restored(run: Callable[[], None]) -> None:
            run()
            for buffer, old in zip(self.work.tensors, before, strict=True):
                buffer.copy_(old)

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                restored(run)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            run()
        self.pool = self.pool or graph.pool()
        for _ in range(TIMED):
            restored(lambda: self._time(key, graph))
        return graph

    def _time(self, key: GraphKey, graph: torch.cuda.CUDAGraph) -> None:
        """Keep the least time that a graph has taken."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        self.graph_seconds[key] = min(self.graph_seconds.get(key, float("inf")), start.elapsed_time(end) / 1e3)

    def fetch(self, slots: Sequence[int]) -> Callable[[], StepResult]:
        chosen = self.work.slots
        copies = [
            torch.empty(buffer.shape, dtype=buffer.dtype, pin_memory=True).copy_(buffer, non_blocking=True)
            for buffer in (chosen.token_S, chosen.logprob_S, chosen.broken_S)
        ]
        arrived = torch.cuda.Event()
        arrived.record()

        def wait() -> StepResult:
            arrived.synchronize()
            tokens, logprobs, broken = (copy.tolist() for copy in copies)
            return StepResult([[tokens[s]] for s in slots], [[logprobs[s]] for s in slots], [broken[s] for s in slots])

        return wait

    def put(self, into: Tensor, values: Sequence[Any]) -> None:
        staged = self._staging(into)  # free again: what is put depends on what came of the pass before
        staged.numpy()[:] = values
        into.copy_(staged, non_blocking=True)

    def get(self, buffer: Tensor) -> list[Any]:
        staged = self._staging(buffer)
        staged.copy_(buffer, non_blocking=True)
        self._arrived.record()
        self._arrived.synchronize()
        values: list[Any] = staged.tolist()
        return values

    def _staging(self, buffer: Tensor) -> Tensor:
        """Keep memory of the host that the device reads and writes, one per buffer."""
        key = (buffer.data_ptr(), *buffer.shape)
        if key not in self._staged:
            self._staged[key] = torch.empty(buffer.shape, dtype=buffer.dtype, pin_memory=True)
        return self._staged[key]

    def worth_moving(self, rows: int, needed: int) -> bool:
        return self._rows(needed) < self._rows(rows)

    def _rows(self, needed: int) -> int:
        """Round up to a bucket of rows: powers of two; with few shapes 1, 4, 16, and powers of two from there on."""
        power = (needed - 1).bit_length()
        if self.few_shapes and power < 4:
            power += power % 2
        return min(1 << power, len(self.work.slots.token_S))

    def cells(self, needed: int) -> int:
        """Round up to a bucket of cells."""
        return min(self.context, max(SMALLEST_CELLS, 1 << (needed - 1).bit_length()))

    def on_device(self, part: Tensor) -> Tensor:
        return part.pin_memory().to(self.work.slots.token_S.device, non_blocking=True)
