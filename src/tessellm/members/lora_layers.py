"""PEFT's LoRA layers, read: the two factors of a layer's delta. The one place that knows how PEFT keeps them."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn


class LoraDelta(NamedTuple):
    """A linear layer and the delta s B A on it: A is [rank, in], B [out, rank]. The tensors are PEFT's own."""

    base_layer: nn.Module
    down_RI: Tensor
    raw_OR: Tensor
    scale: float
    is_plain: bool  # the layer computes its base plus s B A x, nothing else

    @property
    def up_OR(self) -> Tensor:
        """Return s B."""
        return self.raw_OR if self.scale == 1 else self.raw_OR * self.scale


def read_lora(module: nn.Module) -> LoraDelta | None:
    """Return the delta of a LoRA layer with one active adapter; None for any other module."""
    layer: Any = module
    if not (hasattr(layer, "lora_A") and hasattr(layer, "base_layer") and len(layer.active_adapters) == 1):
        return None
    (name,) = layer.active_adapters
    if layer.merged or layer.disable_adapters or name not in layer.lora_A:
        return None
    is_linear = isinstance(layer.base_layer, nn.Linear) or type(layer.base_layer).__name__ == "Conv1D"
    has_variant = getattr(layer, "lora_variant", {}).get(name) is not None  # DoRA and the like
    down, up = layer.lora_A[name].weight, layer.lora_B[name].weight
    is_plain = is_linear and not has_variant and layer.lora_B[name].bias is None
    return LoraDelta(layer.base_layer, down.detach(), up.detach(), float(layer.scaling[name]), is_plain)
