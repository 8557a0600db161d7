"""SlotCache: preallocated keys and values for many sequences of different lengths, all members of a group together.

A sequence lives in a slot. Its token at position p is written to cell p of the slot, whatever the other slots do, so a
finished sequence frees its slot at once. Padding is written to a junk cell behind the last one, which nobody reads.

Shapes: S slots, M members of the group, R rows of a pass (slots × members, slot-major), H key-value heads, C cells,
D head size, T tokens of a pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from transformers import Cache


@dataclass
class Pass:
    """Where the tokens of one forward pass stand. Rows are slot-major: row = slot · M + member."""

    position_RT: Tensor  # of each token in its sequence; −1 is padding
    row_R: Tensor | int  # which rows of the cache; a number means the first so many
    cells: int  # positions of the cache that are read
    start: int | None = None  # of all rows' tokens, if they begin alike, without padding, and end the cells
    windows: set[int | None] = field(default_factory=set)  # those that the layers asked for
    _masks: dict[int | None, Tensor] = field(default_factory=dict)
    _biases: dict[int | None, Tensor | None] = field(default_factory=dict)

    def first(self, window: int | None) -> int:
        """The first cell that a layer with this window reads, as far as the host knows."""
        return 0 if window is None or self.start is None else max(0, self.start - window + 1)

    def mask(self, window: int | None) -> Tensor:
        """What each token may read, itself included, from the first cell on: [R, 1, T, cells], True where it may."""
        if window not in self._masks:
            cell_C = torch.arange(self.first(window), self.cells, device=self.position_RT.device)
            seen = cell_C <= self.position_RT[..., None]
            if window is not None:
                seen = seen & (cell_C > self.position_RT[..., None] - window)
            self._masks[window] = seen[:, None]
        return self._masks[window]

    def bias(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """The mask as numbers to add to scores; None where every token may read every cell. It looks at the positions,
        so it is for a CPU, where that costs nothing."""
        if window not in self._biases:
            mask = self.mask(window)
            least = torch.finfo(dtype).min / 2  # not −inf: rows of padding see nothing at all
            self._biases[window] = (
                None if mask.all() else torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, least)
            )
        return self._biases[window]

    @cached_property
    def row_list(self) -> list[int]:
        return list(range(len(self.position_RT))) if isinstance(self.row_R, int) else self.row_R.tolist()

    @cached_property
    def spans(self) -> list[tuple[int, int, int]] | None:
        """Where each row's tokens go: the first that is no padding, its cell, and how many there are. None where the
        tokens of a row do not follow one another. For a CPU, too."""
        found = []
        for positions in self.position_RT.tolist():
            skipped = next((t for t, position in enumerate(positions) if position >= 0), len(positions))
            own = positions[skipped:]
            if own and own != list(range(own[0], own[0] + len(own))):
                return None
            found.append((skipped, own[0] if own else 0, len(own)))
        return found


class SlotCache(Cache):
    """Keys and values of one group of members; buffers are made at the first pass, when their shapes are known."""

    def __init__(self, slots: int, members: int, cells: int):
        self.slots, self.members, self.cells = slots, members, cells
        self.key_RHCD: dict[int, Tensor] = {}
        self.value_RHCD: dict[int, Tensor] = {}
        self.now: Pass | None = None  # set before each pass

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple:
        """Write this pass's keys and values; hand back all that its rows may read."""
        now = self.now
        assert now is not None
        if layer_idx not in self.key_RHCD:
            self.key_RHCD[layer_idx] = self._allocate(key_states)
            self.value_RHCD[layer_idx] = self._allocate(value_states)
        new = ((self.key_RHCD[layer_idx], key_states), (self.value_RHCD[layer_idx], value_states))
        if key_states.device.type == "cpu" and now.spans is not None:
            for buffer, new_RHTD in new:
                for r, (row, (skipped, cell, count)) in enumerate(zip(now.row_list, now.spans, strict=True)):
                    buffer[row, :, cell : cell + count] = new_RHTD[r, :, skipped:]
        else:
            cell_RT = torch.where(now.position_RT < 0, self.cells, now.position_RT)
            row_R = torch.arange(len(cell_RT), device=cell_RT.device) if isinstance(now.row_R, int) else now.row_R
            for buffer, new_RHTD in new:
                buffer[row_R[:, None], :, cell_RT] = new_RHTD.transpose(1, 2).to(buffer.dtype)
        read = [buffer[:, :, : now.cells] for buffer, _ in new]
        if isinstance(now.row_R, int):
            return tuple(part[: now.row_R] for part in read)
        return tuple(part.index_select(0, now.row_R) for part in read)

    def _allocate(self, like_RHTD: Tensor) -> Tensor:
        _, heads, _, size = like_RHTD.shape
        return like_RHTD.new_zeros(self.slots * self.members, heads, self.cells + 1, size)

    def copy_slot(self, source: int, target: int, cells: int) -> None:
        """The first cells of one slot into another."""
        m = self.members
        for buffer in (*self.key_RHCD.values(), *self.value_RHCD.values()):
            buffer[target * m : target * m + m, :, :cells] = buffer[source * m : source * m + m, :, :cells]

    @property
    def bytes(self) -> int:
        return sum(t.nbytes for t in (*self.key_RHCD.values(), *self.value_RHCD.values()))

    @property
    def layers(self) -> list:  # type: ignore[override]
        return []

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # positions are always given; nothing counts from here

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.cells

    @property
    def is_compileable(self) -> bool:
        return True

    @property
    def is_sliding(self) -> list[bool]:
        return [False]

    def __len__(self) -> int:
        return len(self.key_RHCD)
