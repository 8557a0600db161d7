"""PinnedTransfers: copies between the host and a CUDA device that the host need not wait for. Knows tensors alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class PinnedTransfers:
    """Keeps memory of the host that the device reads and writes, one piece per buffer."""

    def __init__(self) -> None:
        self._staged: dict[tuple[Any, ...], Tensor] = {}
        self._spare: dict[tuple[int, ...], list[list[Tensor]]] = defaultdict(list)
        self._aside = torch.cuda.Stream()  # on which copies to the host do not hold up the passes behind them

    def put(self, into: Tensor, values: Sequence[Any] | Tensor, rows: Sequence[int] | None = None) -> None:
        """Copy values into a buffer, or into some of its rows. Its piece is free again: what is put depends on what
        came of the pass before."""
        staged = self._staging(into)
        staged.numpy()[:] = values
        for at in [slice(None)] if rows is None else rows:
            into[at].copy_(staged[at], non_blocking=True)

    def get(self, buffer: Tensor) -> Callable[[], Tensor]:
        """Begin to copy a buffer to its piece of the host's memory; what is returned waits for it. Until then no pass
        may write the buffer."""
        staged, arrived = self._staging(buffer), torch.cuda.Event()
        self._aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._aside):
            staged.copy_(buffer, non_blocking=True)
            arrived.record()

        def wait() -> Tensor:
            arrived.synchronize()
            return staged

        return wait

    def fetch(self, buffers: Sequence[Tensor]) -> Callable[[], list[list[Any]]]:
        """Begin to copy buffers to the host; what is returned waits for them, once."""
        spare = self._spare[tuple(buffer.data_ptr() for buffer in buffers)]
        copies = spare.pop() if spare else [_pinned_like(buffer) for buffer in buffers]
        for copy, buffer in zip(copies, buffers, strict=True):
            copy.copy_(buffer, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()

        def wait() -> list[list[Any]]:
            arrived.synchronize()
            found = [copy.tolist() for copy in copies]
            spare.append(copies)
            return found

        return wait

    def on_device(self, part: Tensor, device: torch.device) -> Tensor:
        return part.pin_memory().to(device, non_blocking=True)

    def _staging(self, buffer: Tensor) -> Tensor:
        key = (buffer.data_ptr(), *buffer.shape)
        if key not in self._staged:
            self._staged[key] = _pinned_like(buffer)
        return self._staged[key]


def _pinned_like(buffer: Tensor) -> Tensor:
    return torch.empty(buffer.shape, dtype=buffer.dtype, pin_memory=True)
