"""Attention over slots, as an attention implementation of Hugging Face's: any of its architectures can run on it.

The library makes no mask for an implementation that it has none for, so the mask comes from the pass: a token reads the
cells of its own slot up to its own position. Queries are grouped by key-value head: keys and values are read once, and
never repeated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface

from ...errors import EngineError
from ..slots import SlotPass

NAME = "tessellm_slots"
LARGEST_HEAD = 256  # of flash attention
UNKNOWN = ("position_bias", "s_aux", "head_mask")  # other architectures pass these: they would be left out silently


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
    slot_pass.windows.add(sliding_window)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if query.is_cuda and softcap is None and _needs_no_mask(query, slot_pass, sliding_window):
        return _continue(query, key, value, scale), None
    if sliding_window is not None and (first := slot_pass.first(sliding_window)):
        key, value = key[:, :, first:], value[:, :, first:]
    mask = slot_pass.mask(sliding_window, query.dtype)
    rows, heads, steps, size = query.shape
    if softcap is not None or (query.is_cuda and steps == 1):
        return _attend_by_scores(query, key, value, mask, scale, softcap), None
    if mask is not None and query.is_cuda:
        mask = mask | (slot_pass.position_RT < 0)[:, None, :, None]  # padding reads anything: nobody reads padding
    groups = heads // key.shape[1]
    if mask is not None and groups > 1 and steps > 1:
        mask = mask.repeat(1, 1, groups, 1)
    grouped = query.reshape(rows, key.shape[1], groups * steps, size)  # heads that share keys: queries of one head
    read = functional.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scale)
    return read.reshape(rows, heads, steps, -1).transpose(1, 2), None


def _needs_no_mask(query: Tensor, slot_pass: SlotPass, window: int | None) -> bool:
    """Whether a GPU's fastest attention can take the pass: half precision, rows that begin alike, no cell outside the
    window."""
    seen = slot_pass.start is not None and (window is None or slot_pass.cells <= window)
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
    if mask is not None and mask.dtype == torch.bool:
        score = score.masked_fill(~mask[:, :, None], torch.finfo(score.dtype).min)
    elif mask is not None:
        score = score + mask[:, :, None]
    weight = score.softmax(-1, dtype=torch.float32).to(value.dtype).flatten(2, 3)
    return (weight @ value).view(rows, heads, steps, -1).transpose(1, 2)


AttentionInterface.register(NAME, slot_attention)
