"""Which rows of logits are computed, kept and real: the bookkeeping of positions that a forward pass needs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 26  # log-probabilities are combined in slices of at most this many numbers


def time_slices(steps: int, elements_a_step: int) -> Iterator[tuple[int, int]]:
    """Cut `steps` positions into slices of at most CHUNK_ELEMENTS numbers."""
    size = max(1, CHUNK_ELEMENTS // max(1, elements_a_step))
    for start in range(0, steps, size):
        yield start, min(start + size, steps)


def kept_rows(keep: int | Tensor) -> slice | Tensor:
    """Which of the rows computed the caller wants, by Hugging Face's convention: a number counts from the end."""
    if isinstance(keep, Tensor):
        return keep
    return slice(-keep, None) if keep else slice(None)


def mask_rows(attention_mask: Tensor | None, input_ids: Tensor) -> Tensor:
    """Which of the tokens fed are real, as booleans."""
    if attention_mask is None or attention_mask.ndim != 2:
        return torch.ones_like(input_ids, dtype=torch.bool)
    return attention_mask[:, -input_ids.shape[1] :].to(input_ids.device).bool()
