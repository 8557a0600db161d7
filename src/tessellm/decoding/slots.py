"""SlotCache: preallocated keys and values for many sequences of different lengths, all members of a group together.

A sequence lives in a slot. Its token at position p is written to cell p of the slot, whatever the other slots do, so a
finished sequence frees its slot at once. Padding is written to a junk cell behind the last one, which nobody reads.
Masked cells are multiplied by zero, not left out, so every cell must be finite: `clear` makes a slot so again.

Shapes: S slots, M members of the group, B rows of a pass, R rows of a pass and a member (B × M, slot-major), H
key-value heads, C cells, D head size, T tokens per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor
from transformers import Cache


class RowOrder(Enum):
    """Which slots the rows of a pass are."""

    ANY_SLOTS = "any"  # as slot_B says; tokens are padded on the left
    FIRST_SLOTS = "first"  # row b is slot b; tokens are padded on the right


class PromptRead(Enum):
    """What the rule reads of a prompt's tokens in a pass."""

    NOTHING = "nothing"  # the prompt goes on for longer than the rule looks back
    BEGIN = "begin"  # the last of them, and nothing of this prompt before
    GO_ON = "go on"  # all of them, after those before


@dataclass(frozen=True)
class TokenBatch:
    """The tokens of one pass."""

    token_BT: Tensor
    position_BT: Tensor  # in the sequence; −1 is padding
    slot_B: Tensor
    cells: int  # that are read
    keep: int = 1  # last positions whose logits are wanted
    order: RowOrder = RowOrder.ANY_SLOTS
    start: int | None = (
        None  # where every row begins, if all begin there, none has padding, and the cells end with them
    )
    reads: PromptRead = PromptRead.BEGIN


@dataclass
class SlotPass:
    """Where the tokens of one pass stand in a group's cache. Rows are slot-major: row = slot · M + member."""

    position_RT: Tensor
    row_R: Tensor
    cells: int
    order: RowOrder = RowOrder.ANY_SLOTS
    start: int | None = None  # as a TokenBatch's
    spans: Sequence[tuple[int, int, int, int, int]] | None = None  # on a CPU, as `begin` says
    windows: set[int | None] = field(default_factory=set)  # that layers asked for
    _masks: dict[int | None, Tensor | None] = field(default_factory=dict)

    def first(self, window: int) -> int:
        """Find the first cell that a layer with this window reads, as far as the host knows."""
        return 0 if self.start is None else max(0, self.start - window + 1)

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """Mark the cells that each token reads, its own included, from the first cell on: [R, 1, T, cells]. On a CPU,
        where looking at the positions costs nothing: numbers to add to scores, None where every token reads every
        cell."""
        if window not in self._masks:
            first = 0 if window is None else self.first(window)
            cell_C = torch.arange(first, self.cells, device=self.position_RT.device)
            seen = cell_C <= self.position_RT[..., None]
            if window is not None:
                seen = seen & (cell_C > self.position_RT[..., None] - window)
            mask: Tensor | None = seen[:, None]
            if seen.device.type == "cpu":
                least = torch.finfo(dtype).min / 2  # not −inf: rows of padding see nothing at all
                mask = None if seen.all() else torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, least)[:, None]
            self._masks[window] = mask
        return self._masks[window]


class SlotCache(Cache):
    """Keys and values of one group of members; buffers are made at the first pass, when their shapes are known."""

    is_sliding = (False,)  # type: ignore[assignment]
    is_compileable = True
    layers = ()  # type: ignore[assignment]

    def __init__(self, slots: int, members: int, cells: int):
        self.slots, self.members, self.cells = slots, members, cells
        self.key_RHCD: dict[int, Tensor] = {}
        self.value_RHCD: dict[int, Tensor] = {}
        self.now: SlotPass | None = None

    def begin(self, batch: TokenBatch) -> SlotPass:
        """Prepare for a pass: where its tokens go, for `update` and for every attention. On a CPU rows are written one
        by one: per row its place in the pass and in the cache, its first real token, that token's cell, and how many
        follow."""
        m, slot_B = self.members, batch.slot_B
        row_R = slot_B if m == 1 else (slot_B[:, None] * m + torch.arange(m, device=slot_B.device)).flatten()
        position_RT, spans = batch.position_BT.repeat_interleave(m, 0), None
        if slot_B.device.type == "cpu":
            spans = []
            for r, (row, positions) in enumerate(zip(row_R.tolist(), position_RT.tolist(), strict=True)):
                count = len(positions) - positions.count(-1)
                first = 0 if positions[0] >= 0 else len(positions) - count  # padding is on one side
                if count:
                    spans.append((r, row, first, positions[first], count))
        self.now = SlotPass(position_RT, row_R, batch.cells, batch.order, batch.start, spans)
        return self.now

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple:
        """Write this pass's keys and values; hand back all that its rows may read."""
        now = self.now
        assert now is not None
        if layer_idx not in self.key_RHCD:
            self.key_RHCD[layer_idx], self.value_RHCD[layer_idx] = map(self._allocate, (key_states, value_states))
        written = ((self.key_RHCD[layer_idx], key_states), (self.value_RHCD[layer_idx], value_states))
        if now.spans is not None:
            for buffer, new_RHTD in written:
                for r, row, first, cell, count in now.spans:
                    buffer[row, :, cell : cell + count] = new_RHTD[r, :, first : first + count]
        else:
            cell_RT = torch.where(now.position_RT < 0, self.cells, now.position_RT)
            for buffer, new_RHTD in written:
                buffer[now.row_R[:, None], :, cell_RT] = new_RHTD.transpose(1, 2).to(buffer.dtype)
        if now.order is RowOrder.FIRST_SLOTS:
            return tuple(buffer[: len(now.row_R), :, : now.cells] for buffer, _ in written)
        return tuple(buffer[:, :, : now.cells].index_select(0, now.row_R) for buffer, _ in written)

    def _allocate(self, like_RHTD: Tensor) -> Tensor:
        _, heads, _, size = like_RHTD.shape
        return like_RHTD.new_zeros(self.slots * self.members, heads, self.cells + 1, size)

    def take_rows(self, shared: SlotCache, member: int) -> None:
        """Take one member's rows of a group's cache, without a copy."""
        self.key_RHCD = {layer: buffer[member :: shared.members] for layer, buffer in shared.key_RHCD.items()}
        self.value_RHCD = {layer: buffer[member :: shared.members] for layer, buffer in shared.value_RHCD.items()}

    def copy_slot(self, source: int, target: int, cells: int) -> None:
        """Copy the first cells of one slot into another."""
        for buffer in self._buffers:
            rows_SM = buffer.unflatten(0, (-1, self.members))
            rows_SM[target, :, :, :cells] = rows_SM[source, :, :, :cells]

    def clear(self, slot: int, first: int = 0) -> None:
        """Zero a slot's cells from the first on: what they hold must never be read again, and masks multiply."""
        for buffer in self._buffers:
            buffer.unflatten(0, (-1, self.members))[slot, :, :, first:] = 0

    @property
    def _buffers(self) -> list[Tensor]:
        return [*self.key_RHCD.values(), *self.value_RHCD.values()]

    @property
    def bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # positions are always given; nothing counts from here

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.cells

    def __len__(self) -> int:
        return len(self.key_RHCD)
