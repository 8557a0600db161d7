"""StackedLinear: one linear layer for each of M members, on the rows of all of them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from .cpu_linear import MemberModules
from .segments import Segments


class StackedLinear(nn.Module):
    """Each member's rows meet its own weight."""

    def __init__(self, layers: Sequence[nn.Linear], segments: Segments):
        super().__init__()
        self.own, self.segments = MemberModules(layers), segments
        self.in_features, self.out_features = layers[0].in_features, layers[0].out_features

    @property
    def weight(self) -> Tensor:
        first: Tensor = self.own[0].weight  # type: ignore[assignment]
        return first

    def forward(self, x: Tensor) -> Tensor:
        return self.segments.apply(x, list(self.own))
