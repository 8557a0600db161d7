"""PinnedTransfers: copies between the host and a CUDA device that the host need not wait for. Knows tensors alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class PinnedTransfers:
    """Keeps memory of the host that the device reads and writes, one piece per buffer."""

    def __init__(self) -> None:
        self._staged: dict[tuple[Any, ...], Tensor] = {}
        self._arrived = torch.cuda.Event()

    def put(self, into: Tensor, values: Sequence[Any] | Tensor) -> None:
        """Copy values into a buffer. Its piece is free again: what is put depends on what came of the pass before."""
        staged = self._staging(into)
        staged.numpy()[:] = values
        into.copy_(staged, non_blocking=True)

    def get(self, buffer: Tensor) -> Tensor:
        """Copy a buffer to its piece of the host's memory, and wait for it."""
        staged = self._staging(buffer)
        staged.copy_(buffer, non_blocking=True)
        self._arrived.record()
        self._arrived.synchronize()
        return staged

    def fetch(self, buffers: Sequence[Tensor]) -> Callable[[], list[list[Any]]]:
        """Begin to copy buffers to the host; what is returned waits for them."""
        copies = [
            torch.empty(buffer.shape, dtype=buffer.dtype, pin_memory=True).copy_(buffer, non_blocking=True)
            for buffer in buffers
        ]
        arrived = torch.cuda.Event()
        arrived.record()

        def wait() -> list[list[Any]]:
            arrived.synchronize()
            return [copy.tolist() for copy in copies]

        return wait

    def on_device(self, part: Tensor, device: torch.device) -> Tensor:
        return part.pin_memory().to(device, non_blocking=True)

    def _staging(self, buffer: Tensor) -> Tensor:
        key = (buffer.data_ptr(), *buffer.shape)
        if key not in self._staged:
            self._staged[key] = torch.empty(buffer.shape, dtype=buffer.dtype, pin_memory=True)
        return self._staged[key]
