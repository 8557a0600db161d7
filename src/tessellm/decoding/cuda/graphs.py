"""GraphSteps: every decoding step is one CUDA graph, captured once for each bucket of rows and cells, then replayed; so
is a pass over the end of a short prompt (prompt_graphs.py).

Between steps the host only reads what was chosen a step ago, so the device never waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..state import SlotState
from ..steps import Steps, Written
from ..voices import Special
from .compiled_rule import CompiledRule
from .prompt_graphs import Piece, PromptGraphs, Shape, cut, nothing, shares

if TYPE_CHECKING:
    from ..speculation.drafts import Alone
    from ..speculation.verification import Verification

SMALLEST_CELLS = 256
TIMED = 3  # replays of a graph when it is new


class GraphSteps(Steps):
    """Steps on a CUDA device. `compiled` compiles the rule, which is many small kernels otherwise."""

    def __init__(self, state: SlotState, context: int, compiled: bool):
        super().__init__(state, context)
        self.lag = 1
        self.graphs: dict[tuple[Any, ...], torch.cuda.CUDAGraph] = {}
        self.pool: Any = None
        self._ready: dict[tuple[Any, ...], dict[int, float]] = {}
        self._staged: dict[tuple[Any, ...], Tensor] = {}
        self._arrived = torch.cuda.Event()
        self.prompts = PromptGraphs(state)
        if compiled:
            state.passes = CompiledRule(state.rule)

    def prefill(
        self,
        slots: Sequence[int],
        token_BT: Tensor,
        position_BT: Tensor,
        how: str | None,
        special: Special | None = None,
    ) -> None:
        """Short prompts' ends as graphs, where such came before; all else is run as it is."""
        pieces = cut(slots, token_BT, position_BT) if how and not special else []
        taken = bool(pieces) and all(map(self.prompts.takes, pieces))
        shapes = [self._shape(piece, how) for piece in pieces if how]
        if taken and self.prompts.met(shapes):
            try:
                for piece, shape in zip(pieces, shapes, strict=True):
                    self.prompts.put(piece, self.on_device)
                    self._replay(self.prompts.feed, *shape)
                return
            except torch.OutOfMemoryError:  # graphs keep their memory; passes as they are give it back
                self.prompts.on = False
                torch.cuda.empty_cache()
        super().prefill(slots, token_BT, position_BT, how, special)
        self.prompts.note(shapes)

    @torch.inference_mode()
    def ready_prompts(self, lengths: Sequence[int], how: str) -> None:
        """Passes over padding alone write to no slot's cells, and _capture puts the rest back."""
        at_once = {rows for count in range(1, len(self.state.token_S) + 1) for _, rows in shares(count)}
        for piece in (nothing(rows, length) for length in lengths for rows in sorted(at_once)):
            if self.prompts.takes(piece):
                self.prompts.put(piece, self.on_device)
                self._known(self.prompts.feed, *self._shape(piece, how))
                self.prompts.note([self._shape(piece, how)])

    def _shape(self, piece: Piece, how: str) -> Shape:
        return piece.rows, piece.width, self._cells(piece.stop), how

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

    def ready(
        self, drafts: Verification, member: Alone | None, lengths: Sequence[int], rows: int, cells: int, how: str
    ) -> dict[int, float]:
        """All are captured together, so that none is in the middle of a text."""
        bucket = self._rows(rows), self._cells(cells), self._cells(cells + max(lengths)), how
        if bucket not in self._ready:
            drafts.draft_SG.fill_(-1)  # no cells but those of the next token are written
            drafts.room_S.zero_()
            found = {0: self._known(self.state.decode, self._rows(rows), self._cells(cells), how)}
            for length in lengths:
                shape = self._rows(rows), length, self._cells(cells + length), how
                drafted = self._known(member.draft, *shape) if member else 0.0
                found[length] = drafted + self._known(drafts.verify, *shape)
            self._ready[bucket] = found
        return self._ready[bucket]

    def _known(self, step: Callable[..., None], *given: Any) -> float:
        """The device's seconds for a step, which is captured if it was not."""
        key = (step.__name__, *given)
        if key not in self.graphs:
            began = time.monotonic()
            self.graphs[key] = self._capture(key, step, *given)
            self.prepared_seconds += time.monotonic() - began
        return self.graph_seconds[key]

    def _replay(self, step: Callable[..., None], *given: Any) -> None:
        """Run a step as the graph that it was captured as when it was first run so."""
        self.busy_seconds += self._known(step, *given)
        self.graphs[step.__name__, *given].replay()

    def _capture(self, key: tuple[Any, ...], step: Callable[..., None], *given: Any) -> torch.cuda.CUDAGraph:
        """A step as a graph. It is run before, to compile and choose what it needs, and timed after; all that it
        changed is put back, except for cells of the caches, which the real step writes again."""
        before = [buffer.clone() for buffer in self.state.buffers]

        def restored(run: Callable[[], None]) -> None:
            run()
            for buffer, old in zip(self.state.buffers, before, strict=True):
                buffer.copy_(old)

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                restored(lambda: step(*given))
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            step(*given)
        self.pool = self.pool or graph.pool()
        for _ in range(TIMED):
            restored(lambda: self._time(key, graph))
        return graph

    def _time(self, key: tuple[Any, ...], graph: torch.cuda.CUDAGraph) -> None:
        """The least that a graph has taken."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        self.graph_seconds[key] = min(self.graph_seconds.get(key, float("inf")), start.elapsed_time(end) / 1e3)

    def fetch(self, slots: Sequence[int]) -> Callable[[], Written]:
        tokens_S, logprobs_S = (
            torch.empty(buffer.shape, dtype=buffer.dtype, pin_memory=True).copy_(buffer, non_blocking=True)
            for buffer in (self.state.token_S, self.state.logprob_S)
        )
        arrived = torch.cuda.Event()
        arrived.record()

        def wait() -> Written:
            arrived.synchronize()
            tokens, logprobs = tokens_S.tolist(), logprobs_S.tolist()
            return [[tokens[slot]] for slot in slots], [[logprobs[slot]] for slot in slots]

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
        found: list[Any] = staged.tolist()
        return found

    def _staging(self, buffer: Tensor) -> Tensor:
        """Memory of the host that the device reads and writes, one for each buffer."""
        key = (buffer.data_ptr(), *buffer.shape)
        if key not in self._staged:
            self._staged[key] = torch.empty(buffer.shape, dtype=buffer.dtype, pin_memory=True)
        return self._staged[key]

    def worth_moving(self, rows: int, needed: int) -> bool:
        return self._rows(needed) < self._rows(rows)

    def _rows(self, needed: int) -> int:
        """Powers of two; with few shapes 1, 4, 16, and powers of two from there on."""
        power = (needed - 1).bit_length()
        if self.few_shapes and power < 4:
            power += power % 2
        return min(1 << power, len(self.state.token_S))

    def _cells(self, needed: int) -> int:
        return min(self.context, max(SMALLEST_CELLS, 1 << (needed - 1).bit_length()))

    def on_device(self, part: Tensor) -> Tensor:
        return part.pin_memory().to(self.state.device, non_blocking=True)
