"""A forward over all members of some slots: its tokens, its attention over their KV rows, and the members' logits. What
a GPU captures.

Padding has position −1: its cell is the last one, which nobody reads. Masked cells are multiplied by zero, not
left out, so every cell must be finite: `SlotCache.clear` makes a slot so again.

Shapes: S slots, M members, R rows of a group, B slots of a forward, T tokens per row, H key-value heads, C cells, D
head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from ..members.attention import RowsPass, attend
from ..members.groups import Group

LARGEST_HEAD = 256  # of flash attention


class RowOrder(Enum):
    """Which slots the rows of a forward are."""

    ANY_SLOTS = "any"  # as slot_B says; tokens are padded on the left
    FIRST_SLOTS = "first"  # row b is slot b; tokens are padded on the right


@dataclass(frozen=True)
class TokenBatch:
    """The tokens of one forward over all members of some slots."""

    token_BT: Tensor
    position_BT: Tensor  # in the sequence; −1 is padding
    slot_B: Tensor
    cells: int  # that are read
    keep: int = 1  # last positions whose logits are wanted
    order: RowOrder = RowOrder.ANY_SLOTS
    start: int | None = None  # where all rows begin, if none has padding and the cells end with them


@dataclass(eq=False)
class SlotPass(RowsPass):
    """A forward over all members of some slots."""

    batch: TokenBatch
    position_RT: Tensor
    row_R: Tensor
    masks: dict[int | None, Tensor | None] = field(default_factory=dict)  # by window

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple:
        """Write this forward's keys and values; hand back all that its rows may read."""
        cache, cells, read = self.cache, self.batch.cells, []
        if layer_idx not in cache.key_RHCD:
            cache.allocate(layer_idx, key_states, value_states)
        for buffer, new_RHTD in ((cache.key_RHCD[layer_idx], key_states), (cache.value_RHCD[layer_idx], value_states)):
            buffer[self.row_R[:, None], :, self.position_RT] = new_RHTD.transpose(1, 2).to(buffer.dtype)
            if self.batch.order is RowOrder.FIRST_SLOTS:
                read.append(buffer[: len(self.row_R), :, :cells])
            else:
                read.append(buffer[:, :, :cells].index_select(0, self.row_R))
        return tuple(read)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float | None, window: int | None
    ) -> Tensor:
        if query.is_cuda and softcap is None and _needs_no_mask(query, self.batch, window):
            return _continue(query, key, value, scale)
        first = 0 if window is None else self._first(window)
        if first:
            key, value = key[:, :, first:], value[:, :, first:]
        if window not in self.masks:  # the first layer with this window makes it for all: [R, 1, T, C]
            cell_C = torch.arange(first, self.batch.cells, device=query.device)
            position_RT1 = self.position_RT[..., None]
            seen_RTC = (cell_C <= position_RT1) | (position_RT1 < 0)  # padding reads anything: nobody reads padding
            if window is not None:
                seen_RTC = seen_RTC & (cell_C > position_RT1 - window)
            all_seen = not query.is_cuda and bool(seen_RTC.all())  # on a GPU the host would have to wait to know
            self.masks[window] = None if all_seen else seen_RTC[:, None]
        return attend(query, key, value, self.masks[window], scale, softcap)

    def _first(self, window: int) -> int:
        """Return the first cell that a layer with this window reads, as far as the host knows."""
        return 0 if self.batch.start is None else max(0, self.batch.start - window + 1)


def member_logits(groups: Sequence[Group], batch: TokenBatch) -> list[Tensor]:
    """Compute the logits of all members over the shared vocabulary, in the composition's order: [B, keep, V] each."""
    by_place: dict[int, Tensor] = {}
    for group in groups:
        count, alignments = len(group.members), group.alignments
        if group.same_ids:
            token_BMT = batch.token_BT[:, None].expand(-1, count, -1)
        else:
            token_BMT = torch.stack([each.to_member(batch.token_BT) for each in alignments], 1)
        fused, in_order = group.fused, batch.order is RowOrder.FIRST_SLOTS
        if fused is not None and in_order and fused.takes(*batch.token_BT.shape):
            logits_MBTV = fused(token_BMT.transpose(0, 1), batch.position_BT, batch.cells)[:, :, -batch.keep :]
        elif fused is not None and not in_order and fused.reads_prompts and group.cache.key_RHCD:
            logits_MBTV = fused.read(token_BMT.transpose(0, 1), batch.position_BT, batch.slot_B, batch.keep)
        else:
            position_RT = batch.position_BT.repeat_interleave(count, 0)
            row_R = (batch.slot_B[:, None] * count + torch.arange(count, device=position_RT.device)).flatten()
            slot_pass = SlotPass(group.cache, batch, position_RT, row_R)
            group.segments.set(None, None)
            output = group.module(
                input_ids=token_BMT.flatten(0, 1),
                position_ids=position_RT.clamp_min(0),
                past_key_values=slot_pass,
                use_cache=True,
                logits_to_keep=batch.keep,
                rows_pass=slot_pass,
            )
            logits_MBTV = output.logits.unflatten(0, (-1, count)).transpose(0, 1)
        if group.same_ids:
            own_M = list(logits_MBTV[..., : alignments[0].size])
        else:
            own_M = [each.to_composed(own) for each, own in zip(alignments, logits_MBTV, strict=True)]
        by_place |= zip(group.members, own_M, strict=True)
    return [by_place[place] for place in sorted(by_place)]


def _needs_no_mask(query: Tensor, batch: TokenBatch, window: int | None) -> bool:
    """Whether a GPU's fastest attention can take the forward: half precision, rows that begin alike, no cell outside
    the window."""
    seen = batch.start is not None and (window is None or batch.cells <= window)
    fits = query.dtype.itemsize == 2 and query.shape[-1] <= LARGEST_HEAD
    return seen and fits and query.shape[2] > 1


def _continue(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Attend from tokens that are the last of their cells to all cells before them: [R, T, heads, D]."""
    order: Any = causal_lower_right(query.shape[2], key.shape[2])
    shared = query.shape[1] != key.shape[1]
    read = functional.scaled_dot_product_attention(query, key, value, attn_mask=order, scale=scale, enable_gqa=shared)
    return read.transpose(1, 2)
