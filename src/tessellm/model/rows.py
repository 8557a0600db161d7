"""Which rows of logits are computed, kept and real: the bookkeeping of positions that a forward pass needs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 26  # log-probabilities are combined in slices of at most this many numbers


def slices(count: int, elements_each: int, most: int = CHUNK_ELEMENTS) -> Iterator[tuple[int, int]]:
    """Cut so many positions, or rows of another kind, into slices of at most `most` numbers, but one at the least."""
    size = max(1, most // max(1, elements_each))
    for start in range(0, count, size):
        yield start, min(start + size, count)


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
