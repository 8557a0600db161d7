"""Members in 8 or 4 bits on a CPU: weights packed for torch's products of few rows, and the same weights in bfloat16.

A decode step of few rows is bound by reading weights, so it reads packs. A prefill or a large batch multiplies by the
bfloat16 weights, which are the dequantised packs: a text does not depend on how many others are decoded with it, but
for rounding.

    int8   one scale per output row, symmetric                    torch._weight_int8pack_mm
    int4   groups of 32 weights with a scale and a zero point      torch._weight_int4pack_mm_for_cpu

Weights that lie on a grid of 16 levels in groups of 32, as those of a Q4_0 or Q4_1 GGUF file do, are kept as they are,
up to the rounding of scales to bfloat16. The output layer is never rounded to fewer than 8 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..errors import MemberError

PACKED = ("int8", "int4")  # what a dtype may be beside those of torch
GROUP = 32  # weights that share a scale in int4
LEVELS = 15  # steps between the lowest and the highest of 16 levels
FEW_ROWS = {"int8": 10, "int4": 14}  # up to which packed products are faster than bfloat16 ones, on an EPYC (Zen 5)
ON_GRID = 2e-3  # of a step: weights that are nearer to a grid than this lie on it
SMALLEST = 1e-12  # step or scale


class PackedLinear(nn.Linear):
    """A linear layer that reads its pack for few rows and its bfloat16 weights for many."""

    packed: Tensor
    scale: Tensor

    def __init__(self, layer: nn.Linear, precision: str):
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.precision = precision
        weight_OI = layer.weight.detach().float()
        packed, scale, rounded_OI = _int8(weight_OI) if precision == "int8" else _int4(weight_OI)
        self.register_buffer("packed", packed, persistent=False)
        self.register_buffer("scale", scale, persistent=False)
        self.weight = nn.Parameter(rounded_OI, False)
        if layer.bias is not None:
            self.bias = nn.Parameter(layer.bias.detach().bfloat16(), False)

    def forward(self, input: Tensor) -> Tensor:
        rows_RI = input.reshape(-1, self.in_features)
        few = len(rows_RI) <= FEW_ROWS[self.precision] and input.dtype == torch.bfloat16 and input.device.type == "cpu"
        if not few or (input.requires_grad and torch.is_grad_enabled()):
            return functional.linear(input, self.weight, self.bias)
        out_RO = packed_product(rows_RI, self.packed, self.scale, self.precision)
        if self.bias is not None:
            out_RO = out_RO + self.bias
        return out_RO.reshape(*input.shape[:-1], self.out_features)


class JoinedLinear(nn.Module):
    """Packed layers that read one input, as one layer."""

    def __init__(self, layers: Sequence[Any]):
        super().__init__()
        self.layers, self.precision = nn.ModuleList(layers), layers[0].precision
        self.packed = torch.cat([layer.packed for layer in layers])
        self.scale = torch.cat([layer.scale for layer in layers], 1 if self.precision == "int4" else 0)
        for layer, own in zip(layers, self.packed.split([layer.out_features for layer in layers]), strict=True):
            layer.packed.data = own  # for all who hold it: one copy is enough
        biases = [layer.bias for layer in layers if layer.bias is not None]
        self.bias = torch.cat(biases) if biases else None

    @staticmethod
    def fits(layers: Sequence[nn.Module]) -> bool:
        """Whether the layers' packs can lie one behind another: blocks of 64 rows lie together."""
        packed = [layer for layer in layers if isinstance(layer, PackedLinear)]
        alike = len({(layer.precision, layer.bias is None) for layer in packed}) == 1
        return len(packed) == len(layers) > 1 and alike and all(layer.out_features % 64 == 0 for layer in packed)

    def forward(self, x_RI: Tensor) -> Tensor:
        if len(x_RI) > FEW_ROWS[self.precision]:
            return torch.cat([layer(x_RI) for layer in self.layers], -1)
        out_RO = packed_product(x_RI, self.packed, self.scale, self.precision)
        return out_RO if self.bias is None else out_RO + self.bias


def packed_product(x_RI: Tensor, packed: Tensor, scale: Tensor, precision: str) -> Tensor:
    """Multiply few rows by a pack."""
    if precision == "int8":
        return torch._weight_int8pack_mm(x_RI, packed, scale)
    return torch._weight_int4pack_mm_for_cpu(x_RI, packed, GROUP, scale)


def pack_model(model: Any, precision: str, name: str) -> None:
    """Pack a model's linear layers in place; everything else becomes bfloat16."""
    if model.device.type != "cpu":
        raise MemberError(
            f"member {name!r}: {precision} is for a CPU, and it is on {model.device}. Use bfloat16 there, or a "
            "quantization"
        )
    output, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = output is not None and output.weight is embedding.weight
    for path, layer in [(path, each) for path, each in model.named_modules() if type(each) is nn.Linear]:
        fits = layer.in_features % GROUP == 0 and layer.out_features % 16 == 0
        own = precision if precision == "int8" or (fits and layer is not output) else "int8"
        packed = PackedLinear(layer, own)
        if layer is output and tied:  # one table to gather from and to multiply by
            embedding.weight = packed.weight
        model.set_submodule(path, packed)
    model.bfloat16()


def unpack_model(model: Any) -> None:
    """Turn packed layers into plain ones in bfloat16, in place: once their weights change, packs are not what they
    are."""
    layers: list[Any] = [module for module in model.modules() if isinstance(module, PackedLinear)]
    for layer in layers:
        del layer.packed, layer.scale
        layer.__class__ = nn.Linear


def is_packed(model: Any) -> str | None:
    """Return the precision that a model was packed in."""
    kinds = {module.precision for module in model.modules() if isinstance(module, PackedLinear)}
    return "int4" if "int4" in kinds else next(iter(kinds), None)


def _int8(weight_OI: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the pack, its scales, and the weights that they stand for."""
    scale_O = (weight_OI.abs().amax(1) / 127).clamp_min(SMALLEST).bfloat16()
    level_OI = (weight_OI / scale_O.float()[:, None]).round().clamp(-127, 127)
    return level_OI.to(torch.int8), scale_O, (level_OI * scale_O.float()[:, None]).bfloat16()


def _int4(weight_OI: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same in groups; w = (level − 8) · scale + zero."""
    group_OGW = weight_OI.unflatten(1, (-1, GROUP))
    low_OG1 = group_OGW.amin(-1, keepdim=True)
    scale_OG1 = _steps(group_OGW, low_OG1).bfloat16().float()
    zero_OG1 = (low_OG1 + 8 * scale_OG1).bfloat16().float()
    level_OGW = ((group_OGW - zero_OG1) / scale_OG1 + 8).round().clamp(0, LEVELS)
    packed = torch._convert_weight_to_int4pack_for_cpu(level_OGW.flatten(1).to(torch.int32), 1)
    scale_zero_GO2 = torch.cat([scale_OG1, zero_OG1], -1).transpose(0, 1).contiguous().bfloat16()
    return packed, scale_zero_GO2, ((level_OGW - 8) * scale_OG1 + zero_OG1).flatten(1).bfloat16()


def _steps(group_OGW: Tensor, low_OG1: Tensor) -> Tensor:
    """Return the step of each group's levels, [O, G, 1]: the coarsest grid that its weights lie on if there is one,
    else a fifteenth of its range."""
    offset_OGW = group_OGW - low_OG1
    range_OG1 = offset_OGW.amax(-1, keepdim=True)
    step_OG1, found_OG1 = range_OG1 / LEVELS, torch.zeros_like(range_OG1, dtype=torch.bool)
    for levels in range(1, LEVELS + 1):
        wanted_OG1 = range_OG1 / levels
        place_OGW = offset_OGW / wanted_OG1.clamp_min(SMALLEST)
        fits_OG1 = ((place_OGW - place_OGW.round()).abs().amax(-1, keepdim=True) < ON_GRID) & ~found_OG1
        step_OG1 = torch.where(fits_OG1, wanted_OG1, step_OG1)
        found_OG1 = found_OG1 | fits_OG1
    return step_OG1.clamp_min(SMALLEST)
