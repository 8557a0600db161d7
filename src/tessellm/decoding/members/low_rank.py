"""LowRank: a module with a low-rank delta on it, and the deltas of many members on one module as one batched product.

PEFT's LoRA layers are read as this.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn


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
    layer: Any = module
    if not (hasattr(layer, "lora_A") and hasattr(layer, "base_layer") and len(layer.active_adapters) == 1):
        return None
    (name,) = layer.active_adapters
    if layer.merged or layer.disable_adapters or getattr(layer, "lora_variant", {}).get(name) is not None:
        return None
    if name not in layer.lora_A or layer.lora_B[name].bias is not None:
        return None
    down, up = layer.lora_A[name].weight, layer.lora_B[name].weight
    if not isinstance(layer.base_layer, nn.Linear) and type(layer.base_layer).__name__ != "Conv1D":
        return None
    return LowRank(layer.base_layer, down.detach(), (up * layer.scaling[name]).detach())


class SharedWithDeltas(nn.Module):
    """One layer for the rows of M members, and each member's own delta. Rows are slot-major: [S · M, T, in]."""

    def __init__(self, base_layer: nn.Module, deltas: list[LowRank | None]):
        super().__init__()
        self.base_layer, self.members = base_layer, len(deltas)
        given = [delta for delta in deltas if delta is not None]
        rank = max(len(delta.down_RI) for delta in given)
        one = given[0]
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
        by_member = x.unflatten(0, (-1, self.members)).transpose(0, 1)  # [M, S, T, in]
        low = torch.bmm(by_member.flatten(1, 2).to(self.down_MIR.dtype), self.down_MIR)
        delta = torch.bmm(low, self.up_MRO).unflatten(1, by_member.shape[1:3]).transpose(0, 1).flatten(0, 1)
        y: Tensor = self.base_layer(x)
        return y + delta.to(y.dtype)
