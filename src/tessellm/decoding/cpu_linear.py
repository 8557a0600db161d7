"""CpuLinear: a linear layer for few rows on a CPU. The same product, asked for in the order that is fastest there.

Measured with MKL, one thread, float32: a wide layer takes 0.6 × the time of the library's own form on one row if its
weight lies transposed, and 0.7 × on two to eight rows if the weight comes first in the product. Only an output layer is
kept transposed as well, and only a small one, since that copy costs memory.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

FEW = 8  # rows
COPIED_BYTES = 1 << 28  # the largest output layer of which a transposed copy is kept


class MemberModules(nn.ModuleList):
    """Modules of the members themselves, not copies of ours."""


class CpuLinear(nn.Module):
    """Around the very same weight."""

    def __init__(self, layer: nn.Linear, keep_transposed: bool = False):
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.wide = layer.out_features >= layer.in_features
        copied = keep_transposed and self.wide and layer.weight.nbytes <= COPIED_BYTES
        self.transposed = layer.weight.detach().T.contiguous() if copied else None

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[:-1].numel()
        if rows == 1 and self.transposed is not None:
            found = x.reshape(1, -1) @ self.transposed
        elif 1 < rows <= FEW and self.wide:
            found = (self.weight @ x.reshape(rows, -1).T).T
        else:
            return functional.linear(x, self.weight, self.bias)
        if self.bias is not None:
            found = found + self.bias
        return found.reshape(*x.shape[:-1], -1)


def quicken(module: nn.Module, output: nn.Module | None) -> None:
    """Put a CpuLinear in the place of every plain float32 linear layer on the CPU. What lies deeper than a list of
    members' modules is theirs and stays as it is."""
    for name, child in list(module.named_children()):
        if type(child) is nn.Linear and child.weight.device.type == "cpu" and child.weight.dtype == torch.float32:
            setattr(module, name, CpuLinear(child, keep_transposed=child is output))
        elif not isinstance(module, MemberModules):
            quicken(child, output)
