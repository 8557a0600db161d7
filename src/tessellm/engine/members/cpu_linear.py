"""CpuLinear: a linear layer on a CPU, computed in the way that is fastest there for its number of rows.

Measured with one thread in float32, weights that come from memory, over the time of the library's own form (MKL):

    one row             0.5 (an output layer) to 0.7 ×, if a wide weight lies transposed
    two                 0.2 to 0.5 ×, if the weight comes first in the product
    4 to 32             0.5 to 0.9 ×, by oneDNN with the weight as it likes it: transposed if wide, else packed
    more                0.75 to 0.95 ×, the same

Transposed and packed weights are copies, so only COPIED_BYTES are kept twice; other layers do what can be done without.
Small layers stay in the processor's cache, where the library's own form is the fastest.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

FEW_ROWS, FEW_ROWS_UNCOPIED = 3, 8  # up to which a weight comes first; the second: a wide one that is not kept twice
SMALL = 1 << 17  # numbers below which a layer stays as it is
COPIED_BYTES = 1 << 30  # bytes of weights kept twice, per group of members

_onednn: Any = torch.ops.mkldnn
HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(_onednn, "_linear_pointwise")


class MemberModules(nn.ModuleList):
    """Modules of the members themselves, not copies of ours."""


class CpuLinear(nn.Module):
    """Wraps a layer's own weight; `copied`: a second copy is kept in the order that is read fastest."""

    def __init__(self, layer: nn.Linear, copied: bool = False):
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.in_features, self.out_features = layer.in_features, layer.out_features
        wide = layer.out_features > layer.in_features
        self.few = FEW_ROWS_UNCOPIED if wide and not copied else FEW_ROWS
        self.transposed = layer.weight.detach().T.contiguous() if copied and wide else None
        self.for_many = layer.weight.detach() if self.transposed is None else self.transposed.T
        if copied and not wide and HAS_ONEDNN:
            self.for_many = _onednn._reorder_linear_weight(self.for_many, 16)

    def forward(self, x: Tensor) -> Tensor:
        rows_RI = x.reshape(-1, self.in_features)
        rows = len(rows_RI)
        if rows == 1 and self.transposed is not None:
            out_RO = rows_RI @ self.transposed
        elif 1 < rows <= self.few:
            out_RO = (self.weight @ rows_RI.T).T
        elif rows > 1 and HAS_ONEDNN:
            return self._shaped(_onednn._linear_pointwise(rows_RI, self.for_many, self.bias, "none", [], ""), x)
        else:
            return functional.linear(x, self.weight, self.bias)
        return self._shaped(out_RO if self.bias is None else out_RO + self.bias, x)

    def _shaped(self, out_RO: Tensor, x: Tensor) -> Tensor:
        return out_RO.reshape(*x.shape[:-1], self.out_features)


def quicken(module: nn.Module, output: nn.Module | None) -> None:
    """Replace every large float32 linear layer on the CPU by a CpuLinear, the output layer first. What lies deeper than
    a list of members' modules is theirs and stays as it is."""
    left = COPIED_BYTES
    for parent, name, layer in sorted(_plain_layers(module), key=lambda place: place[2] is not output):
        copied = layer.weight.nbytes <= left
        left -= layer.weight.nbytes * copied
        setattr(parent, name, CpuLinear(layer, copied))


def _plain_layers(module: nn.Module) -> list[tuple[nn.Module, str, nn.Linear]]:
    """List large linear layers: the parent of each, its name there, and the layer."""
    layers: list[tuple[nn.Module, str, nn.Linear]] = []
    for name, child in module.named_children():
        if type(child) is nn.Linear:
            weight = child.weight
            if weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel() >= SMALL:
                layers.append((module, name, child))
        elif not isinstance(module, MemberModules):
            layers += _plain_layers(child)
    return layers
