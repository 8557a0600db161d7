"""Numbers over many texts, with intervals. Tokens of one text are not independent: texts are what is resampled.

Shapes: R rows (scored tokens of all texts, one after another), B texts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..statistics import bootstrap

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Rate:
    """A mean over tokens, with its interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{percent(self.value)} ({percent(self.low)} to {percent(self.high)})"


def counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def percent(share: float) -> str:
    digits = 1 if share < 0.9995 else 0
    return f"{100 * share:.{digits}f}\u00a0%"  # kept on one line


def average(value_R: Tensor, text_R: Tensor, texts: int, seed: int = 0) -> Rate:
    """The mean over tokens of any number."""
    zeros_B = torch.zeros(texts, dtype=torch.float64)
    sum_B = zeros_B.index_add(0, text_R, value_R.double())
    count_B = zeros_B.index_add(0, text_R, torch.ones_like(value_R, dtype=torch.float64))
    low, high = bootstrap(sum_B, count_B, CONFIDENCE, seed)
    return Rate(float(sum_B.sum() / count_B.sum().clamp_min(1)), low, high)


def rate(value_R: Tensor, text_R: Tensor, texts: int, seed: int = 0) -> Rate:
    """The share of tokens for which something holds. Where it held never, or always, no resample would differ; then
    with the same confidence fewer than 1 − δ^(1/B) of new texts do."""
    found = average(value_R, text_R, texts, seed)
    unseen = 1 - (1 - CONFIDENCE) ** (1 / texts)
    low = found.low if found.value < 1 else 1 - unseen
    return Rate(found.value, low, found.high if found.value > 0 else unseen)
