"""Keys and values of many sequences, in slots, and attention over them, as a cache and an attention implementation of
Hugging Face's: any of its architectures can run on them.

A sequence lives in a slot. Its token at position p is written to cell p of the slot, whatever the other slots do, so a
finished sequence frees its slot at once. Padding has position −1: it is written to the last cell, which nobody reads.
Masked cells are multiplied by zero, not left out, so every cell must be finite: `clear` makes a slot so again.

The library makes no mask for an implementation that it has none for, so the mask comes from the pass: a token reads the
cells of its own slot up to its own position. Queries are grouped by key-value head: keys and values are read once, and
never repeated.

Shapes: S slots, M members of the group, R rows of a pass and a member (row = slot · M + member), H key-value heads, C
cells, D head size, T tokens per row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface, Cache

from ...errors import EngineError
from ..buffers import RowOrder, TokenBatch

NAME = "tessellm_slots"
LARGEST_HEAD = 256  # of flash attention
UNKNOWN = ("position_bias", "s_aux", "head_mask")  # other architectures pass these: they would be left out silently


class SlotCache:
    """Keys and values of one group of members; buffers are made at the first pass, when their shapes are known."""

    def __init__(self, slots: int, members: int, cells: int):
        self.slots, self.members, self.cells = slots, members, cells
        self.key_RHCD: dict[int, Tensor] = {}  # by layer, as the values
        self.value_RHCD: dict[int, Tensor] = {}
        self.windows: set[int | None] = set()  # that layers asked for

    def allocate(self, layer: int, key_RHTD: Tensor, value_RHTD: Tensor) -> None:
        """Make room for a layer's keys and values, and a cell more for padding."""
        for buffers, like_RHTD in ((self.key_RHCD, key_RHTD), (self.value_RHCD, value_RHTD)):
            _, heads, _, size = like_RHTD.shape
            buffers[layer] = like_RHTD.new_zeros(self.slots * self.members, heads, self.cells + 1, size)

    def take_rows(self, shared: SlotCache, member: int) -> None:
        """Take one member's rows of a group's cache, without a copy."""
        self.key_RHCD = {layer: buffer[member :: shared.members] for layer, buffer in shared.key_RHCD.items()}
        self.value_RHCD = {layer: buffer[member :: shared.members] for layer, buffer in shared.value_RHCD.items()}

    def copy_slot(self, source: int, target: int, cells: int) -> None:
        """Copy the first cells of one slot into another."""
        for buffer in self._buffers:
            row_SM = buffer.unflatten(0, (-1, self.members))  # narrowed, not sliced: a launch should be what takes time
            row_SM[target].narrow(2, 0, cells).copy_(row_SM[source].narrow(2, 0, cells))

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


@dataclass(eq=False)
class SlotPass(Cache):
    """One pass over a group's cache, which is the cache that its module sees: where the tokens stand."""

    cache: SlotCache
    batch: TokenBatch
    position_RT: Tensor
    row_R: Tensor
    masks: dict[int | None, Tensor | None] = field(default_factory=dict)  # by window, as slot_attention makes them

    is_sliding = (False,)  # type: ignore[assignment]
    is_compileable = True
    layers = ()  # type: ignore[assignment]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple:
        """Write this pass's keys and values; hand back all that its rows may read."""
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

    def first(self, window: int) -> int:
        """Find the first cell that a layer with this window reads, as far as the host knows."""
        return 0 if self.batch.start is None else max(0, self.batch.start - window + 1)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # positions are always given; nothing counts from here

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.cache.cells

    def __len__(self) -> int:
        return len(self.cache.key_RHCD)


def slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    slot_pass: SlotPass | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend with queries [R, heads, T, D] to the cells [R, key-value heads, C, D] of their slots."""
    if slot_pass is None or any(kwargs.get(name) is not None for name in UNKNOWN):
        raise EngineError(f"{type(module).__name__} needs an attention that the fast path does not have")
    if not getattr(module, "applies_softcap", True):
        softcap = None
    slot_pass.cache.windows.add(sliding_window)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if query.is_cuda and softcap is None and _needs_no_mask(query, slot_pass.batch, sliding_window):
        return _continue(query, key, value, scale), None
    first = 0 if sliding_window is None else slot_pass.first(sliding_window)
    if first:
        key, value = key[:, :, first:], value[:, :, first:]
    if sliding_window not in slot_pass.masks:  # the first layer with this window makes it for all: [R, 1, T, C]
        cell_C = torch.arange(first, slot_pass.batch.cells, device=query.device)
        position_RT1 = slot_pass.position_RT[..., None]
        seen_RTC = (cell_C <= position_RT1) | (position_RT1 < 0)  # padding reads anything: nobody reads padding
        if sliding_window is not None:
            seen_RTC = seen_RTC & (cell_C > position_RT1 - sliding_window)
        all_seen = not query.is_cuda and bool(seen_RTC.all())  # on a GPU the host would have to wait to know
        slot_pass.masks[sliding_window] = None if all_seen else seen_RTC[:, None]
    mask = slot_pass.masks[sliding_window]
    rows, heads, steps, size = query.shape
    if softcap is not None or (query.is_cuda and steps == 1):
        return _attend_by_scores(query, key, value, mask, scale, softcap), None
    groups = heads // key.shape[1]
    if mask is not None and groups > 1 and steps > 1:
        mask = mask.repeat(1, 1, groups, 1)
    grouped = query.reshape(rows, key.shape[1], groups * steps, size)  # heads that share keys: queries of one head
    read = functional.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scale)
    return read.reshape(rows, heads, steps, -1).transpose(1, 2), None


def _needs_no_mask(query: Tensor, batch: TokenBatch, window: int | None) -> bool:
    """Whether a GPU's fastest attention can take the pass: half precision, rows that begin alike, no cell outside the
    window."""
    seen = batch.start is not None and (window is None or batch.cells <= window)
    fits = query.dtype.itemsize == 2 and query.shape[-1] <= LARGEST_HEAD
    return seen and fits and query.shape[2] > 1


def _continue(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Attend from tokens that are the last of their cells to all cells before them: [R, T, heads, D]."""
    order: Any = causal_lower_right(query.shape[2], key.shape[2])
    shared = query.shape[1] != key.shape[1]
    read = functional.scaled_dot_product_attention(query, key, value, attn_mask=order, scale=scale, enable_gqa=shared)
    return read.transpose(1, 2)


def _attend_by_scores(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, softcap: float | None
) -> Tensor:
    """Attend by products and a softmax, with scores that may be capped: [R, T, heads, D]."""
    rows, heads, steps, size = query.shape
    grouped = query.reshape(rows, key.shape[1], -1, size)  # [R, H, groups · T, D]
    score = (grouped @ key.transpose(2, 3)) * scale
    if softcap is not None:
        score = torch.tanh(score / softcap) * softcap
    score = score.view(rows, key.shape[1], -1, steps, key.shape[2])
    if mask is not None:
        score = score.masked_fill(~mask[:, :, None], torch.finfo(score.dtype).min)
    weight = score.softmax(-1, dtype=torch.float32).to(value.dtype).flatten(2, 3)
    return (weight @ value).view(rows, heads, steps, -1).transpose(1, 2)


AttentionInterface.register(NAME, slot_attention)
