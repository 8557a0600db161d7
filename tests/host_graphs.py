"""Captured steps without a GPU: passes are recorded and replayed as on one, by calling them again. What a capture would
refuse is refused: numbers that come from the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tessellm.decoding.cuda import graphs
from tessellm.decoding.cuda.compiled_rule import compiled_runner
from tessellm.decoding.cuda.graphs import GraphSteps
from tessellm.decoding.engine import Engine
from tessellm.decoding.prompt_pace import PromptPace

REFUSAL = "Cannot copy between CPU and CUDA tensors during CUDA graph capture"


class FixedPromptPace(PromptPace):
    """Pieces of so many tokens, whatever they take."""

    def __init__(self, tokens: int):
        super().__init__(on_gpu=False)
        self.tokens = self.least = self.most = tokens


class HostRecorder:
    def record(
        self, run: Callable[[], None], restored: Callable[[Any], None], known: bool = False
    ) -> Callable[[], None]:
        restored(run)
        with refusing_the_host():
            restored(run)
        return run

    def seconds(self, run: Callable[[], None]) -> float:
        run()
        return 1e-3


@contextmanager
def refusing_the_host() -> Iterator[None]:
    def refuse(*given: Any, **settings: Any) -> Any:
        raise RuntimeError(f"{REFUSAL}\nand more lines")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "tensor", refuse)
        yield


class HostTransfers:
    def put(self, into: Tensor, values: Sequence[Any] | Tensor, rows: Sequence[int] | None = None) -> None:
        at = slice(None) if rows is None else list(rows)
        into[at] = torch.as_tensor(values)[at]

    def get(self, buffer: Tensor) -> Callable[[], Tensor]:
        copy = buffer.clone()
        return lambda: copy

    def fetch(self, buffers: Sequence[Tensor]) -> Callable[[], list[list[Any]]]:
        copies = [buffer.clone() for buffer in buffers]
        return lambda: [copy.tolist() for copy in copies]

    def on_device(self, part: Tensor, device: torch.device) -> Tensor:
        return part


def captured(engine: Engine, compiled: bool = False) -> Engine:
    """Let an engine on a CPU run captured steps, by a compiled rule if wanted."""
    work = engine.steps.work
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "GraphRecorder", HostRecorder)
        patch.setattr(graphs, "PinnedTransfers", HostTransfers)
        if compiled:
            work = replace(work, runner=compiled_runner(work.voice.rule))
        engine.steps = GraphSteps(work, engine.context, few_shapes=False)
    return engine
