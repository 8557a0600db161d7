"""How sure a score is, and a difference of two: bootstrap over problems, and paired tests on the same problems."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..model.rows import slices
from ..statistics import AT_ONCE
from ..statistics import bootstrap as resampled

DRAWS = 10_000
SEED = 0


@dataclass(frozen=True)
class Interval:
    """A mean with its 95 % bootstrap interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Difference:
    """How much better the first of two columns is on the same problems, and how often chance would do as much."""

    interval: Interval
    p: float


def bootstrap(scores: Sequence[float], least: float = 0.0, most: float = 1.0) -> Interval:
    """Problems drawn anew with replacement; the percentiles of the means. Where all scores are alike a bootstrap would
    claim to be sure: there, what n problems without an exception leave open (exact binomial), between the bounds."""
    values = np.asarray(scores, dtype=float)
    if (values == values[0]).all():
        mean, open_share = float(values[0]), 1 - 0.025 ** (1 / len(values))
        return Interval(mean, mean - open_share * (mean - least), mean + open_share * (most - mean))
    values_B = torch.from_numpy(values)
    return Interval(float(values.mean()), *resampled(values_B, torch.ones_like(values_B), 0.95, SEED, DRAWS))


def compare(first: Sequence[float], second: Sequence[float]) -> Difference:
    """Paired: problem by problem."""
    if len(first) != len(second):
        raise ValueError(f"expected the same problems; got {len(first)} and {len(second)}")
    differences = np.asarray(first, dtype=float) - np.asarray(second, dtype=float)
    return Difference(bootstrap(differences.tolist(), least=-1.0), sign_flip_test(differences))


def sign_flip_test(differences: np.ndarray) -> float:
    """Two-sided p of a mean so far from zero if every difference had either sign alike. Exact where all differences
    have one size (right or wrong answers: McNemar's test), else by draws."""
    moved = differences[differences != 0]
    if len(moved) == 0:
        return 1.0
    if np.all(np.abs(moved) == abs(moved[0])):
        from math import comb

        n, most = len(moved), int(max((moved > 0).sum(), (moved < 0).sum()))
        tail = sum(comb(n, k) for k in range(most, n + 1))
        return min(1.0, float(2 * tail / 2**n))
    generator = np.random.default_rng(SEED)
    wanted, extreme = abs(moved.sum()) - 1e-12, 0
    for start, stop in slices(DRAWS, len(moved), AT_ONCE):
        signs = generator.integers(0, 2, (stop - start, len(moved))) * 2 - 1
        extreme += int((np.abs(signs @ moved) >= wanted).sum())
    return (extreme + 1) / (DRAWS + 1)
