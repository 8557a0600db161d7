"""GraphRecorder: turn passes into CUDA graphs, in one pool of memory, and time them. Knows torch.cuda and callables;
neither what a pass computes nor which buffers it changes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

Pass = Callable[[], None]


class GraphRecorder:
    """Captures passes whose memory may be shared, since they run one after another."""

    def __init__(self) -> None:
        self.pool: Any = None
        self._stream: Any = None  # of all captures and of the passes before them, whose memory is kept for the next

    def record(self, run: Pass, restored: Callable[[Pass], None], known: bool = False) -> Pass:
        """Return what replays a pass. `restored` calls a function and puts back what it changed. RuntimeError: the pass
        cannot be captured, as when the host waits for the device in it; `known`: in others of its kind it does not."""
        self._stream = stream = self._stream or torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                restored(run)  # compiles, and chooses what it needs
                if not known:
                    with refusing_waits():
                        restored(run)
                return self._captured(run)
        finally:
            torch.cuda.current_stream().wait_stream(stream)

    def _captured(self, run: Pass) -> Pass:
        try:
            return self._capture(run)
        except torch.OutOfMemoryError:  # what is kept for later passes is not given back while one is captured
            torch.cuda.empty_cache()
            return self._capture(run)

    def _capture(self, run: Pass) -> Pass:
        """Capture on the current stream. Not by torch.cuda.graph, which waits for the device and gives back all memory
        that is kept before each: most of what a capture takes where there are hundreds."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self.pool)
        try:
            run()
            graph.capture_end()
        except BaseException:
            self.pool = None  # it may count as in use for ever
            with suppress(RuntimeError):  # that the capture is no longer valid, or over
                graph.capture_end()
            raise
        self.pool = self.pool or graph.pool()
        return graph.replay

    def seconds(self, run: Pass) -> float:
        """Measure the device's time for a pass."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3


@contextmanager
def refusing_waits() -> Iterator[None]:
    """Raise RuntimeError where the host would wait for the device: what a capture refuses, before one has begun."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls this mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
