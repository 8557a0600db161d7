"""StackedLinear: one linear layer for each of M members, on the rows of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .cpu_linear import MemberModules
from .fused import runs_on

MOST_ROWS = 256  # of a member that are one launch with the others'; more keep a GPU busy by themselves


class StackedLinear(nn.Module):
    """Rows are slot-major, [S · M, T, in]; each member's rows meet its own weight. On a GPU, in half precision, the
    products of a short prompt are one launch for all members: each by itself keeps a fifth of an H200 busy."""

    def __init__(self, layers: Sequence[nn.Linear]):
        super().__init__()
        self.own = MemberModules(layers)
        self.in_features, self.out_features = layers[0].in_features, layers[0].out_features
        self._at_once = _fused(layers)

    @property
    def weight(self) -> Tensor:
        first: Tensor = self.own[0].weight  # type: ignore[assignment]
        return first

    def forward(self, x: Tensor) -> Tensor:
        rows = x.unflatten(0, (-1, len(self.own)))
        if self._at_once is not None and rows.ndim == 4 and rows.shape[0] * rows.shape[2] <= MOST_ROWS:
            return at_once(self._at_once, rows).flatten(0, 1)
        return torch.stack([layer(rows[:, m]) for m, layer in enumerate(self.own)], 1).flatten(0, 1)


def at_once(fused: Any, x_SMTK: Tensor) -> Tensor:
    """[S, M, T, in] to [S, M, T, out], in one launch."""
    slots, _, tokens, _ = x_SMTK.shape
    parts_PMBN = fused(x_SMTK.transpose(0, 1).flatten(1, 2).contiguous())
    y_MBN = parts_PMBN[0] if len(parts_PMBN) == 1 else parts_PMBN.sum(0).to(x_SMTK.dtype)
    return y_MBN.unflatten(1, (slots, tokens)).transpose(0, 1)


def _fused(layers: Sequence[nn.Linear]) -> Any:
    """A FusedLinear, where there is one for these layers."""
    weight = layers[0].weight
    if weight.dtype.itemsize != 2 or not runs_on(weight.device):
        return None
    from .fused.layers import fuse_layers

    return fuse_layers(layers)
