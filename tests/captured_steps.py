"""An engine on the CPU whose passes are captured and replayed, as on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tessellm.engine.cuda import graphs
from tessellm.engine.cuda.graphs import GraphExecutor
from tessellm.engine.cuda.slot_executor import SlotExecutor, workspace
from tessellm.engine.engine import Engine
from tessellm.engine.prefill_controller import PrefillPace
from tessellm.engine.routes import Routes

from replay_tape import REFUSAL, LikeCuda, Pool, Run, Tape


class FixedPrefillPace(PrefillPace):
    """Pieces of so many tokens, whatever they take."""

    def __init__(self, tokens: int):
        super().__init__(on_gpu=False)
        self.tokens = self.least = self.most = tokens

    @property
    def due(self) -> bool:
        return False


class TapeRecorder:
    """Records passes on tapes that share a pool. `strict`: one that cannot be captured fails the test."""

    def __init__(self, strict: bool = True) -> None:
        self.pool, self.strict = Pool(), strict

    def record(self, run: Run, restored: Callable[[Run], None], known: bool = False) -> Run:
        try:
            with LikeCuda():
                restored(run)
            return Tape(self.pool).capture(run)
        except RuntimeError as error:
            if self.strict and REFUSAL in str(error):
                raise AssertionError(str(error)) from error
            raise

    def seconds(self, run: Run) -> float:
        run()
        return 1e-3


class HostTransfers:
    def put(self, into: Tensor, values: Sequence[Any] | Tensor, rows: Sequence[int] | None = None) -> None:
        at = slice(None) if rows is None else list(rows)
        into[at] = torch.as_tensor(values)[at]

    def get(self, buffer: Tensor) -> Callable[[], Tensor]:
        """Copy as late as a device may: when the copy is waited for."""
        return buffer.clone

    def fetch(self, buffers: Sequence[Tensor]) -> Callable[[], list[list[Any]]]:
        copies = [buffer.clone() for buffer in buffers]
        return lambda: [copy.tolist() for copy in copies]

    def on_device(self, part: Tensor, device: torch.device) -> Tensor:
        return part


def captured(engine: Engine, compiled: bool = False, strict: bool = True) -> Engine:
    """Let an engine on a CPU run captured steps, by a compiled rule if wanted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "GraphRecorder", partial(TapeRecorder, strict))
        patch.setattr(graphs, "PinnedTransfers", HostTransfers)
        return over_slots(engine, GraphExecutor, compiled)


def over_slots(engine: Engine, kind: Any = SlotExecutor, compiled: bool = False) -> Engine:
    """Let an engine on a CPU run all members of every slot."""
    routes, groups = Routes(engine.model), engine.executor.groups
    if not isinstance(engine.executor, SlotExecutor):  # cells of a branch need not be finite
        for group in groups:
            group.cache.key_RHCD.clear()
            group.cache.value_RHCD.clear()
    work = workspace(engine.model, groups, routes, len(engine.in_slot), compiled)
    engine.executor = kind(engine.model, work, routes, engine.context)
    engine.controller.padded = True
    if engine.speculator is not None:
        engine.speculator.executor = engine.executor
    return engine
