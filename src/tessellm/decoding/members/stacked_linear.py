"""StackedLinear: one linear layer for each of M members, on the rows of all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .cpu_linear import MemberModules


class StackedLinear(nn.Module):
    """Rows are slot-major, [S · M, T, in]; each member's rows meet its own weight."""

    def __init__(self, layers: Sequence[nn.Linear]):
        super().__init__()
        self.own = MemberModules(layers)
        self.in_features, self.out_features = layers[0].in_features, layers[0].out_features

    @property
    def weight(self) -> Tensor:
        first: Tensor = self.own[0].weight  # type: ignore[assignment]
        return first

    def forward(self, x: Tensor) -> Tensor:
        rows = x.unflatten(0, (-1, len(self.own)))
        return torch.stack([layer(rows[:, m]) for m, layer in enumerate(self.own)], 1).flatten(0, 1)
