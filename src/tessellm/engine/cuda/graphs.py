"""GraphExecutor: every decoding step is one CUDA graph, captured once for each bucket of rows and cells, then replayed;
so is a forward over the end of a short prompt (prompt_graphs.py). One that cannot be captured is run as it is.

Between steps the host only reads what was chosen a step ago, so the device never waits for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ...errors import first_line
from ...model import ComposedForCausalLM
from ..executor import StepResult, row_bucket
from ..requests import Request
from ..routes import Routes
from ..sampling import TokenChoice
from .passes import Seen, Workspace, decode_step
from .prompt_graphs import PromptGraphs, PromptRows, PromptShape, cut_into_buckets, grid, padding_rows, split_rows
from .recording import GraphRecorder, Pass
from .slot_buffers import Mixing
from .slot_executor import SlotExecutor
from .transfers import PinnedTransfers
from .verification import verify

SMALLEST_CELLS = 256
PREPARED_CELLS = 4  # factor between the buckets of cells that are prepared: one with more does for fewer
TIMED = 3  # replays of a graph when it is new
PREPARED_STEPS = (TokenChoice.GREEDY, TokenChoice.SAMPLED, TokenChoice.PENALISED)  # the last does for NUCLEUS, too
PREPARED_DRAFTS = (TokenChoice.GREEDY, TokenChoice.SAMPLED, TokenChoice.NUCLEUS)  # penalised requests have none

log = logging.getLogger("tessellm.engine")

GraphKey = tuple[Any, ...]  # the pass's name, then its shape


class GraphExecutor(SlotExecutor):
    """Forwards on a CUDA device."""

    in_flight = 1

    def __init__(self, model: ComposedForCausalLM, work: Workspace, routes: Routes, context: int):
        super().__init__(model, work, routes, context)
        self.capture_seconds: dict[GraphKey, float] = {}  # the host's, to prepare a forward, compiling included
        self.recorder, self.transfers = GraphRecorder(), PinnedTransfers()
        self.graphs: dict[GraphKey, Pass] = {}  # what replays each forward
        self.graph_seconds: dict[GraphKey, float] = {}  # the device's, per captured forward, when it was new
        self.uncaptured: set[GraphKey] = set()  # kinds of forwards that cannot be captured
        self._never_waits: set[GraphKey] = set()  # kinds of forwards in which the host was seen not to wait
        self._wider: dict[GraphKey, GraphKey] = {}  # once all is prepared: which forward does for another
        self._ready: dict[tuple[Any, ...], dict[int, float]] = {}
        self.prompts = PromptGraphs(work)
        self._step, self._verify = partial(decode_step, work), partial(verify, work, self.drafts)

    def read(
        self,
        slots: Sequence[int],
        token_BT: Tensor,
        position_BT: Tensor,
        choice: TokenChoice,
        mixing: Mixing,
        seen: Seen | None = None,
    ) -> None:
        """Replay short prompts and chunks as graphs, where such shapes came before; run all else as it is."""
        parts = cut_into_buckets(slots, token_BT, position_BT, self.sealed) if seen is None else []
        shapes = [self._shape(part, mixing, choice) for part in parts]
        if parts and all(self.prompts.takes(part) for part in parts) and self._met(shapes):
            try:
                for part, shape in zip(parts, shapes, strict=True):
                    self.prompts.put(part, self.on_device)
                    self._replay("read", self.prompts.read, *shape)
                return
            except torch.OutOfMemoryError:  # graphs keep their memory; forwards as they are give it back
                self.prompts.turn_off()
                torch.cuda.empty_cache()
        super().read(slots, token_BT, position_BT, choice, mixing, seen)
        self.prompts.note(shapes)

    @torch.inference_mode()
    def ready_prompts(self, lengths: Sequence[int], choice: TokenChoice) -> None:
        """Capture forwards over padding alone, which write to no slot's cells; _capture puts the rest back."""
        for part in (padding_rows(rows, length) for length in lengths for rows in self._at_once()):
            if self.prompts.takes(part):
                shape = self._shape(part, self.own_mixing, choice)
                self.prompts.put(part, self.on_device)
                self._known("read", self.prompts.read, *shape)
                self.prompts.note([shape])

    @property
    def own_mixing(self) -> Mixing:
        """How requests are combined that name no experts."""
        return Mixing.COMPONENTS if self.routes.table.own is None else Mixing.RULE

    def planned(self) -> Iterator[Callable[[], object]]:
        """Plan every step that slots and context allow, and forwards over short prompts and chunks: at the beginning
        of a slot, and behind as much as it holds; each call prepares one."""
        for mixing in dict.fromkeys((self.own_mixing, Mixing.COMPONENTS)):
            for choice, (rows, cells) in product(PREPARED_STEPS, self.prepared_sizes()):
                yield partial(self._prepare, "decode", self._step, rows, mixing, cells, choice)
            for part in grid(self._at_once(), self.context):
                for choice in self.prompts.kinds(part):
                    for c in {self._prompt_cells(part), self.context}:
                        yield partial(self._ready_prompt, part, mixing, c, choice)

    def planned_drafts(self, lengths: Sequence[int]) -> Iterator[Callable[[], object]]:
        for choice, (rows, cells) in product(PREPARED_DRAFTS, self.prepared_sizes()):
            yield partial(self.ready_lengths, lengths, rows, self.own_mixing, max(1, cells - lengths[-1]), choice)

    def prepared_sizes(self) -> list[tuple[int, int]]:
        rows = sorted({self.row_count(needed) for needed in range(1, len(self.work.slots.token_S) + 1)})
        cells = [min(SMALLEST_CELLS, self.context)]
        while cells[-1] < self.context:
            cells.append(min(cells[-1] * PREPARED_CELLS, self.context))
        return list(product(rows, cells))

    @torch.inference_mode()
    def chunk_seconds(self) -> dict[int, float]:
        """Return the device's seconds for chunks of prompts, by their tokens."""
        chunks = [key for key in self.graphs if key[0] == "read" and TokenChoice.NONE in key]
        return {key[2]: self._known("read", self.prompts.read, *key[1:]) for key in chunks}

    def _at_once(self) -> list[int]:
        """List the buckets of rows in which prompts are read."""
        counts = range(1, len(self.work.slots.token_S) + 1)
        return sorted({rows for count in counts for _, rows in split_rows(count)})

    def _ready_prompt(self, part: PromptRows, mixing: Mixing, cells: int, choice: TokenChoice) -> None:
        try:
            if self.prompts.on:
                self.prompts.put(part, self.on_device)
                self._prepare("read", self.prompts.read, part.rows, part.width, mixing, cells, choice)
        except torch.OutOfMemoryError:
            self.prompts.turn_off()
            torch.cuda.empty_cache()

    def _met(self, shapes: Sequence[PromptShape]) -> bool:
        """Whether these passes are graphs, or shall be; once all is prepared, no more are made in front of a user."""
        if self.sealed:
            return all(self._key("read", *shape) in self.graphs for shape in shapes)
        return self.prompts.met(shapes)

    def _shape(self, part: PromptRows, mixing: Mixing, choice: TokenChoice) -> PromptShape:
        return part.rows, part.width, mixing, self._prompt_cells(part), choice

    def _prompt_cells(self, part: PromptRows) -> int:
        return self.context if self.prompts.any_cells else self.cells(part.stop)

    def step(self, rows: int, mixing: Mixing, kv_len: int, choice: TokenChoice, seen: Seen | None) -> None:
        """Replay a step; one that is observed is run as it is: which rows are observed differs from step to step."""
        shape = self.row_count(rows), mixing, self.cells(kv_len), choice
        if seen is not None:
            self._step(*shape, seen)
        else:
            self._replay("decode", self._step, *shape)

    def run_verify(self, rows: int, length: int, mixing: Mixing, kv_len: int, choice: TokenChoice) -> None:
        self._replay("verify", self._verify, self.row_count(rows), length, mixing, self.cells(kv_len), choice)

    def ready_drafts(
        self, lengths: Sequence[int], running: Sequence[Request], slots: Sequence[int]
    ) -> Mapping[int, float]:
        choice, kv_len = max(r.sampling.choice for r in running), max(r.kv_len for r in running)
        return self.ready_lengths(lengths, slots[-1] + 1, self._mixing(running), kv_len, choice)

    @torch.inference_mode()
    def ready_lengths(
        self, lengths: Sequence[int], rows: int, mixing: Mixing, kv_len: int, choice: TokenChoice
    ) -> Mapping[int, float]:
        """Capture forwards of all lengths together, so that none is captured in the middle of a text."""
        rows, most = self.row_count(rows), max(lengths, default=0)
        bucket = most, rows, mixing, self.cells(kv_len), self.cells(kv_len + most), choice
        if bucket not in self._ready:
            self.drafts.clear()  # no cells but those of the next token are written
            seconds = {0: self._known("decode", self._step, rows, mixing, self.cells(kv_len), choice)}
            for length in lengths:
                reach = self.cells(kv_len + length)
                seconds[length] = self._known("verify", self._verify, rows, length, mixing, reach, choice)
            self._ready[bucket] = seconds
        return self._ready[bucket]

    def _known(self, name: str, run: Callable[..., None], *shape: Any) -> float:
        """Look up the device's seconds for a forward; capture and time it if it was not."""
        key = self._key(name, *shape)
        self._prepare(name, run, *key[1:])
        for _ in range(TIMED if key not in self.graph_seconds else 0):
            self._restoring()(lambda: self._time(key, self.graphs[key]))
        return self.graph_seconds.get(key, 0.0)

    def _prepare(self, name: str, run: Callable[..., None], *shape: Any) -> None:
        """Capture a pass if it was not."""
        key = (name, *shape)
        if key not in self.graphs:
            began = time.monotonic()
            self.graphs[key] = self._capture(key, partial(run, *shape))
            self.captures += 1
            self.capture_seconds[key] = time.monotonic() - began
            self.prepared_seconds += self.capture_seconds[key]

    def _replay(self, name: str, run: Callable[..., None], *shape: Any) -> None:
        """Run a pass as a graph, captured when that shape first comes."""
        key = self._key(name, *shape)
        if key not in self.graphs:
            self._known(name, run, *shape)
        self.graphs[key]()

    def _key(self, name: str, *shape: Any) -> GraphKey:
        """Name the pass of a shape. Once all is prepared: of those that are, the least with as many cells and ways of
        choosing (if any), which does the same."""
        key = (name, *shape)
        if not self.sealed or key in self.graphs:
            return key
        if key not in self._wider:
            *same, cells, choice = key
            others = (each for each in self.graphs if list(each[:-2]) == same)
            wider = [
                each for each in others if each[-2] >= cells and each[-1] >= choice and bool(each[-1]) == bool(choice)
            ]
            self._wider[key] = min(wider, key=lambda each: each[-2:], default=key)
        return self._wider[key]

    def _capture(self, key: GraphKey, run: Pass) -> Pass:
        """Capture a pass; return what replays it, or the pass itself where it cannot be captured. Puts back all that is
        changed, except for cells of the caches, which the real pass writes again."""
        if _kind(key) in self.uncaptured:
            self._restoring()(run)
            return run
        return self._record(key, run, self._restoring())

    def _restoring(self) -> Callable[[Pass], None]:
        """Make what runs a pass and puts back what it changes."""
        before = [buffer.clone() for buffer in self.work.tensors]

        def restored(run: Pass) -> None:
            try:
                run()
            finally:
                for buffer, old in zip(self.work.tensors, before, strict=True):
                    buffer.copy_(old)

        return restored

    def _record(self, key: GraphKey, run: Pass, restored: Callable[[Pass], None]) -> Pass:
        """Record a pass; one of a kind that cannot be captured is said once. An error of its own comes again later."""
        kind = _kind(key)
        try:
            replay = self.recorder.record(run, restored, known=kind in self._never_waits)
            self._never_waits.add(kind)
            return replay
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if not any(other[0] == key[0] for other in self.uncaptured):
                log.warning("passes of the kind %r run uncaptured, which is slower: %s", key[0], first_line(error))
            self.uncaptured.add(kind)
            return run

    def _time(self, key: GraphKey, run: Pass) -> None:
        """Keep the least time that a pass has taken."""
        self.graph_seconds[key] = min(self.graph_seconds.get(key, float("inf")), self.recorder.seconds(run))

    def fetch(self, slots: Sequence[int]) -> Callable[[], StepResult]:
        chosen = self.work.slots
        coming = self.transfers.fetch((chosen.token_S, chosen.logprob_S, chosen.nonfinite_SM))

        def wait() -> StepResult:
            tokens, logprobs, nonfinite = coming()
            return StepResult(
                [[tokens[s]] for s in slots], [[logprobs[s]] for s in slots], [nonfinite[s] for s in slots]
            )

        return wait

    def put(self, into: Tensor, values: Tensor) -> None:
        self.transfers.put(into, values)

    def get(self, buffer: Tensor) -> Callable[[], Tensor]:
        return self.transfers.get(buffer)

    def row_count(self, needed: int) -> int:
        """Round up to a bucket of rows, no more than there are slots."""
        return min(row_bucket(needed, self.few_shapes), len(self.work.slots.token_S))

    def cells(self, needed: int) -> int:
        """Round up to a bucket of cells."""
        return min(self.context, max(SMALLEST_CELLS, 1 << (needed - 1).bit_length()))

    def on_device(self, part: Tensor) -> Tensor:
        return self.transfers.on_device(part, self.work.slots.token_S.device)


def _kind(key: GraphKey) -> GraphKey:
    """Name what passes have in common that wait for the host, or do not: the pass, what of a prompt is read, and how
    tokens are chosen."""
    return key[0], *(part for part in key if isinstance(part, Enum))
