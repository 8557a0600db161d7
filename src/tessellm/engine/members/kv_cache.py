"""Keys and values of many sequences. A KV row belongs to one member and one slot: row = slot · M + member.

The token at position p of a sequence lies in cell p of its rows. On a CPU the memory of a row that nobody writes is
never committed, so members that do not run cost nothing.

Shapes: S slots, M members of the group, R rows, H key-value heads, C cells, D head size.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


class SlotCache:
    """Keys and values of one group of members; buffers are made at the first forward, when their shapes are known."""

    def __init__(self, slots: int, members: int, cells: int):
        self.slots, self.members, self.cells = slots, members, cells
        self.key_RHCD: dict[int, Tensor] = {}  # by layer, as the values
        self.value_RHCD: dict[int, Tensor] = {}
        self.windows: set[int | None] = set()  # that layers asked for

    def allocate(self, layer: int, key_RHTD: Tensor, value_RHTD: Tensor) -> None:
        """Make room for a layer's keys and values, and a cell more for padding."""
        for buffers, like_RHTD in ((self.key_RHCD, key_RHTD), (self.value_RHCD, value_RHTD)):
            _, heads, _, size = like_RHTD.shape
            buffers[layer] = _zeros((self.slots * self.members, heads, self.cells + 1, size), like_RHTD)

    def row(self, slot: int, member: int) -> int:
        return slot * self.members + member

    def copy(self, source: int, target: int, member: int | None, kv_len: int) -> None:
        """Copy the first cells of a slot into another: of one member, or of all."""
        for buffer in self._buffers:
            row_SM = buffer.unflatten(0, (-1, self.members))
            row_S = row_SM if member is None else row_SM[:, member]
            # narrowed, not sliced: a launch should be what takes time
            row_S[target].narrow(-2, 0, kv_len).copy_(row_S[source].narrow(-2, 0, kv_len))

    def clear(self, slot: int, first: int = 0) -> None:
        """Zero a slot's cells from the first on: where masks multiply, what they hold must be finite."""
        for buffer in self._buffers:
            buffer.unflatten(0, (-1, self.members))[slot, :, :, first:] = 0

    def is_finite(self, slot: int, member: int, position: int) -> bool:
        """Return whether a member's token at a position was read without NaN: the last layer's value tells."""
        last = next(reversed(self.value_RHCD.values()))
        return bool(last[self.row(slot, member), :, position].isfinite().all())

    @property
    def _buffers(self) -> list[Tensor]:
        return [*self.key_RHCD.values(), *self.value_RHCD.values()]

    @property
    def bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers)


def _zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Return zeros; on a CPU of memory that is committed when it is first written, which torch's own is at once."""
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    return torch.from_numpy(np.zeros(math.prod(shape) * like.itemsize, np.uint8)).view(like.dtype).view(shape)
