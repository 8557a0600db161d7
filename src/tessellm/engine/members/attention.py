"""Attention over KV rows, as a cache and an attention implementation of Hugging Face's: any of its architectures can
run on them.

The library makes no mask for an implementation that it has none for, so the mask comes from the forward: a token reads
the cells of its own row up to its own position. Queries are grouped by key-value head: keys and values are read once,
and never repeated. A BranchPass has tokens of some members' rows one behind another, [1, N]: every row reads its own
cells, so nothing is padded and no cell of another text is touched. A GPU's forwards are in cuda/slot_pass.py.

Shapes: R rows, N tokens in all, H key-value heads, C cells, D head size, T tokens per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, Cache

from ...errors import EngineError
from .kv_cache import SlotCache

NAME = "tessellm_slots"
BLOCK = 64  # tokens of a row that attend together on a CPU: none to cells behind its own block
UNKNOWN = ("position_bias", "s_aux", "head_mask")  # other architectures pass these: they would be left out silently


@dataclass(eq=False)
class RowsPass(Cache):
    """One forward over KV rows, which is the cache that a group's module sees."""

    cache: SlotCache

    is_sliding = (False,)  # type: ignore[assignment]
    is_compileable = True
    layers = ()  # type: ignore[assignment]

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float | None, window: int | None
    ) -> Tensor:
        """Attend with what `update` returned: [B, T, heads, D]."""
        raise NotImplementedError

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # positions are always given; nothing counts from here

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.cache.cells

    def __len__(self) -> int:
        return len(self.cache.key_RHCD)


class TokenSpan(NamedTuple):
    """Where a KV row's tokens lie in a forward, and the position of the first."""

    kv_row: int
    begin: int
    end: int
    start: int


@dataclass(eq=False)
class BranchPass(RowsPass):
    """A forward over tokens of some rows, one behind another: [1, N]."""

    spans: Sequence[TokenSpan]
    masks: dict[tuple[int, int, int | None], Tensor] = field(default_factory=dict)  # by start, tokens and window

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple:
        """Write this forward's keys and values; hand back all rows."""
        if layer_idx not in self.cache.key_RHCD:
            self.cache.allocate(layer_idx, key_states, value_states)
        key_RHCD, value_RHCD = self.cache.key_RHCD[layer_idx], self.cache.value_RHCD[layer_idx]
        for row, begin, end, start in self.spans:
            key_RHCD[row, :, start : start + end - begin] = key_states[0, :, begin:end]
            value_RHCD[row, :, start : start + end - begin] = value_states[0, :, begin:end]
        return key_RHCD, value_RHCD

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float | None, window: int | None
    ) -> Tensor:
        read = query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])
        for row, begin, end, start in self.spans:
            for a in range(begin, end, BLOCK):
                b, position = min(a + BLOCK, end), start + a - begin
                first = 0 if window is None else max(0, position - window + 1)
                cells = slice(first, position + b - a)
                mask = self._mask(position, b - a, window) if b - a > 1 else None
                own = query[:, :, a:b], key[row : row + 1, :, cells], value[row : row + 1, :, cells]
                read[:, a:b] = attend(*own, mask, scale, softcap)
        return read

    def _mask(self, start: int, tokens: int, window: int | None) -> Tensor:
        """Which cells, from the first that one of the tokens reads, each token reads: [1, 1, T, C]."""
        key = start, tokens, window
        if key not in self.masks:
            first = 0 if window is None else max(0, start - window + 1)
            device = next(iter(self.cache.key_RHCD.values())).device
            cell_C, position_T1 = (
                torch.arange(first, start + tokens, device=device),
                torch.arange(start, start + tokens, device=device)[:, None],
            )
            seen_TC = cell_C <= position_T1
            if window is not None:
                seen_TC = seen_TC & (cell_C > position_T1 - window)
            self.masks[key] = seen_TC[None, None]
        return self.masks[key]


def slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    rows_pass: RowsPass | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend with queries [B, heads, T, D] to the cells of their rows."""
    if rows_pass is None or any(kwargs.get(name) is not None for name in UNKNOWN):
        raise EngineError(f"{type(module).__name__} needs an attention that the fast path does not have")
    if not getattr(module, "applies_softcap", True):
        softcap = None
    rows_pass.cache.windows.add(sliding_window)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return rows_pass.attend(query, key, value, scale, softcap, sliding_window), None


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, softcap: float | None
) -> Tensor:
    """Attend with queries [R, heads, T, D] to keys and values [R, H, C, D]: [R, T, heads, D]."""
    rows, heads, steps, size = query.shape
    if softcap is not None or (query.is_cuda and steps == 1):
        return _attend_by_scores(query, key, value, mask, scale, softcap)
    groups = heads // key.shape[1]
    if mask is not None and groups > 1 and steps > 1:
        mask = mask.repeat(1, 1, groups, 1)
    grouped = query.reshape(rows, key.shape[1], groups * steps, size)  # heads that share keys: queries of one head
    read = functional.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scale)
    return read.reshape(rows, heads, steps, -1).transpose(1, 2)


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
