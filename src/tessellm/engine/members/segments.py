"""Segments: which tokens of a forward are whose. The modules of a group share one object, set before each forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor


class Segment(NamedTuple):
    """A member's tokens in a forward over [1, N], one behind another."""

    member: int  # its place in the group
    begin: int
    end: int


@lru_cache(maxsize=64)
def others_columns(segments: tuple[Segment, ...], ranks: tuple[int, ...]) -> Tensor:
    """Return which columns are not a token's own, [N, L], for tokens from the first segment's to the last one's.
    `ranks`: each segment's columns, side by side."""
    first = segments[0].begin
    others_NL = torch.ones(segments[-1].end - first, sum(ranks), dtype=torch.bool)
    for place, (_, begin, end) in enumerate(segments):
        column = sum(ranks[:place])
        others_NL[begin - first : end - first, column : column + ranks[place]] = False
    return others_NL


class Segments:
    """Members' tokens one behind another; None: rows are slot-major, [S · M, T], each member has one in each slot."""

    def __init__(self) -> None:
        self.current: Sequence[Segment] | None = None

    @cached_property
    def kept(self) -> Segments:
        """The same of those tokens behind which logits are wanted."""
        return Segments()

    def set(self, current: Sequence[Segment] | None, kept: Sequence[Segment] | None) -> None:
        self.current, self.kept.current = current, kept

    def apply(self, x: Tensor, functions: Sequence[Callable[[Tensor], Tensor]], at: int = 1) -> Tensor:
        """Run a function per member on its own tokens, which lie along the dimension `at`."""
        if self.current is None:
            rows = x.unflatten(0, (-1, len(functions)))
            return torch.stack([run(rows[:, m].contiguous()) for m, run in enumerate(functions)], 1).flatten(0, 1)
        return torch.cat([functions[m](x.narrow(at, begin, end - begin)) for m, begin, end in self.current], at)
