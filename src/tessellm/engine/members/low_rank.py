"""LowRank: a module with a low-rank delta on it, and the deltas of many members on one module as one batched product.

PEFT's LoRA layers are read as this.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor, nn

from ...members.lora_layers import read_lora
from .segments import Segments


class LowRank(nn.Module):
    """A linear layer of the base plus B A x: A is [rank, in], B [out, rank], scaling already in B."""

    def __init__(self, base_layer: nn.Module, down_RI: Tensor, up_OR: Tensor):
        super().__init__()
        self.base_layer = base_layer
        self.down_RI, self.up_OR = nn.Parameter(down_RI, False), nn.Parameter(up_OR, False)

    def forward(self, x: Tensor) -> Tensor:
        """Add the delta in the slow, obvious form, with which the batched one is compared."""
        y: Tensor = self.base_layer(x) + (x @ self.down_RI.T) @ self.up_OR.T
        return y


def read_low_rank(module: nn.Module) -> LowRank | None:
    """Read a module as a low-rank delta on a linear layer; None if it is something else (DoRA, a merged adapter, …)."""
    if isinstance(module, LowRank):
        return module
    delta = read_lora(module)
    return LowRank(*delta[:3]) if delta is not None and delta.is_plain else None


class SharedWithDeltas(nn.Module):
    """One layer for the rows of M members, and each member's own delta on its rows."""

    def __init__(self, base_layer: nn.Module, deltas: list[LowRank | None], segments: Segments):
        super().__init__()
        self.base_layer, self.members, self.segments = base_layer, len(deltas), segments
        given = [delta for delta in deltas if delta is not None]
        self.ranks = [0 if delta is None else len(delta.down_RI) for delta in deltas]
        one, rank = given[0], max(self.ranks)
        dtype = reduce(torch.promote_types, [delta.down_RI.dtype for delta in given])  # adapters' own may differ
        down_MRI = one.down_RI.new_zeros(len(deltas), rank, one.down_RI.shape[1], dtype=dtype)
        up_MRO = one.up_OR.new_zeros(len(deltas), rank, one.up_OR.shape[0], dtype=dtype)
        for m, delta in enumerate(deltas):
            if delta is not None:
                own = len(delta.down_RI)
                down_MRI[m, :own], up_MRO[m, :own] = delta.down_RI, delta.up_OR.T
        self.down_MIR = nn.Parameter(down_MRI.transpose(1, 2).contiguous(), False)
        self.up_MRO = nn.Parameter(up_MRO, False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base_layer(x)
        if self.segments.current is None:
            return y + self._of_all(x).to(y.dtype)
        for m, begin, end in self.segments.current:
            if rank := self.ranks[m]:
                own = x[0, begin:end].to(self.down_MIR.dtype)
                delta = (own @ self.down_MIR[m, :, :rank]) @ self.up_MRO[m, :rank]
                y[0, begin:end] += delta.to(y.dtype)
        return y

    def _of_all(self, x: Tensor) -> Tensor:
        """Compute the deltas of slot-major rows, [S · M, T, in], as batched products."""
        by_member = x.unflatten(0, (-1, self.members)).transpose(0, 1)  # [M, S, T, in]
        low = torch.bmm(by_member.flatten(1, 2).to(self.down_MIR.dtype), self.down_MIR)
        return torch.bmm(low, self.up_MRO).unflatten(1, by_member.shape[1:3]).transpose(0, 1).flatten(0, 1)
