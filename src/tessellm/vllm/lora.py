"""A LoRA adapter's matrices on the base's linear layers, sharded over devices as those are.

The delta B·A·x is added where vLLM applies a layer's own weights, before results are gathered or summed over devices.
A fused layer (q, k and v in one) takes the adapters of its parts as one: their A below each other, their B in the
columns of a block matrix.

Shapes: M members in the batch (the first is the base, without a delta), T tokens, I inputs, O outputs, R rank.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ..members.sources import Source, weight_files
from .versions import LinearBase, LinearMethodBase, ModelWeightParameter, QKVParallelLinear, RowParallelLinear

PREFIX = "base_model.model."
QKV = ("q", "k", "v")


@dataclass(frozen=True)
class Adapter:
    """One adapter's deltas by the name of the base's module: (A [R, I], scale · B [O, R])."""

    name: str
    deltas: dict[str, tuple[Tensor, Tensor]]

    @property
    def signature(self) -> str:
        """What a compiled graph depends on: the layers changed, and the ranks."""
        return self.name + ":" + ",".join(f"{module}={len(a_RI)}" for module, (a_RI, _) in sorted(self.deltas.items()))


def plain_config(source: Source) -> Any:
    """The adapter's configuration, or None if it is more than LoRA's two matrices a layer."""
    from peft import PeftConfig

    config: Any = PeftConfig.from_pretrained(str(source.directory))
    beyond = (
        "use_dora",
        "lora_bias",
        "modules_to_save",
        "layer_replication",
        "trainable_token_indices",
        "target_parameters",
        "alora_invocation_tokens",
    )
    if config.peft_type.value != "LORA" or config.bias != "none" or any(getattr(config, key, None) for key in beyond):
        return None
    return config


def plain_ranks(source: Source) -> list[int] | None:
    """The ranks in an adapter of vLLM's kind; None if it is more."""
    config = plain_config(source)
    return None if config is None else [config.r, *config.rank_pattern.values()]


def read_adapter(source: Source, name: str) -> Adapter | None:
    """The adapter in that folder, or None if it is more than LoRA's two matrices a layer."""
    from peft.utils.other import get_pattern_key

    config = plain_config(source)
    if config is None:
        return None
    tensors = load_file(weight_files(source.directory)[0])
    deltas = {}
    for key in sorted(key for key in tensors if key.endswith(".lora_A.weight")):
        module = key.removeprefix(PREFIX).removesuffix(".lora_A.weight")
        a_RI, b_OR = tensors.pop(key), tensors.pop(key.replace(".lora_A.", ".lora_B."))
        alpha = config.alpha_pattern.get(get_pattern_key(config.alpha_pattern.keys(), module), config.lora_alpha)
        rank = len(a_RI)
        deltas[module] = (a_RI, b_OR * (alpha / (math.sqrt(rank) if config.use_rslora else rank)))
    return None if tensors else Adapter(name, deltas)


def fits(model: nn.Module, adapter: Adapter) -> bool:
    """Whether every module that the adapter changes is a linear layer of this model."""
    modules = dict(model.named_modules())
    return all(isinstance(modules.get(place(model, name)[0]), LinearBase) for name in adapter.deltas)


def attach(model: nn.Module, adapters: Sequence[Adapter | None]) -> None:
    """Put the adapters of all members, None for the base, on a loaded model's layers."""
    parts: dict[str, list[dict[Any, tuple[Tensor, Tensor]]]] = defaultdict(lambda: [{} for _ in adapters])
    for number, adapter in enumerate(adapters):
        for name, delta in (adapter.deltas if adapter else {}).items():
            path, shard = place(model, name)
            parts[path][number][shard] = delta
    for path, member_parts in parts.items():
        layer: Any = model.get_submodule(path)
        layer.quant_method = AdaptedLinear(layer, member_parts)


def place(model: Any, name: str) -> tuple[str, Any]:
    """Where vLLM keeps a module of Hugging Face's: the layer's path, and which part of a fused layer it is."""
    parent, _, leaf = name.rpartition(".")
    for fused, leaves in getattr(model, "packed_modules_mapping", {}).items():
        if leaf in leaves and len(leaves) > 1:
            path = f"{parent}.{fused}"
            layer = dict(model.named_modules()).get(path)
            number = leaves.index(leaf)
            return path, QKV[number] if isinstance(layer, QKVParallelLinear) else number
    return name, None


class AdaptedLinear(LinearMethodBase):
    """A layer's own way to apply its weights, and every member's delta on that member's rows."""

    def __init__(self, layer: Any, parts: Sequence[dict[Any, tuple[Tensor, Tensor]]]):
        self.inner = layer.quant_method
        rank = max(sum(len(a_RI) for a_RI, _ in shards.values()) for shards in parts)
        deltas = [_sharded(layer, shards, rank) for shards in parts]
        layer.register_buffer("delta_a_MIR", torch.stack([a_RI.T for a_RI, _ in deltas]), persistent=False)
        layer.register_buffer("delta_b_MRO", torch.stack([b_OR.T for _, b_OR in deltas]), persistent=False)

    def create_weights(self, *arguments: Any, **options: Any) -> None:
        self.inner.create_weights(*arguments, **options)

    def process_weights_after_loading(self, layer: Any) -> None:
        self.inner.process_weights_after_loading(layer)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        out = self.inner.apply(layer, x, bias)
        x_MTI = x.view(len(layer.delta_a_MIR), -1, x.shape[-1])
        delta_MTO = x_MTI @ layer.delta_a_MIR @ layer.delta_b_MRO
        return out + delta_MTO.view(out.shape)


def _sharded(layer: Any, shards: dict[Any, tuple[Tensor, Tensor]], rank: int) -> tuple[Tensor, Tensor]:
    """One member's A [R, I] and B [O, R] on this device. vLLM's own loader cuts them as it cuts the weights."""
    weight = layer.weight
    inputs = layer.input_size if not isinstance(layer, RowParallelLinear) else layer.input_size_per_partition
    a_RI = _parameter(layer, (rank, inputs), weight)
    b_OR = _parameter(layer, (weight.shape[0], rank), weight)
    start = 0
    for shard, (part_a_RI, part_b_OR) in shards.items():
        stop = start + len(part_a_RI)
        whole_RI, whole_OR = torch.zeros(rank, part_a_RI.shape[1]), torch.zeros(len(part_b_OR), rank)
        whole_RI[start:stop], whole_OR[:, start:stop] = part_a_RI, part_b_OR
        if isinstance(layer, RowParallelLinear):
            weight.weight_loader(a_RI, whole_RI.to(weight))
            b_OR.data += whole_OR.to(weight)
        else:
            a_RI.data += whole_RI.to(weight)
            weight.weight_loader(b_OR, whole_OR.to(weight), *([] if shard is None else [shard]))
        start = stop
    return a_RI.data, b_OR.data


def _parameter(layer: Any, shape: tuple[int, int], weight: Tensor) -> ModelWeightParameter:
    zeros = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
    return ModelWeightParameter(data=zeros, input_dim=1, output_dim=0, weight_loader=layer.weight.weight_loader)
