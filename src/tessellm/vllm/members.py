"""One inner vLLM model per full member; adapters of the base are rows of the base's own batch.

An adapter needs its base's weights and a key-value cache of its own. So the base runs once on the tokens of all of
them, one member's rows below the other's: every weight is read once, each attention layer hands each member's rows to
an attention layer of that member, and each adapted linear layer adds each member's delta to its rows (lora.py).
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ..errors import MemberError
from ..members import Loading, MemberSpec, load_member
from ..members.sources import Source
from .lora import Adapter, attach, fits
from .versions import (
    Attention,
    AttentionLayerBase,
    get_hf_text_config,
    init_vllm_registered_model,
    safetensors_weights_iterator,
    set_model_tag,
)


def inner_config(outer: Any, hf_config: PreTrainedConfig, name: str) -> Any:
    """vLLM's configuration for one member. The caches and the layers that are known by name stay the outer model's."""
    inner = outer.with_hf_config(hf_config)
    model_config = inner.model_config
    model_config.hf_text_config = text = get_hf_text_config(hf_config)
    model_config.model_arch_config = model_config.get_model_arch_config()
    inner.cache_config = copy.copy(outer.cache_config)
    kinds = getattr(text, "layer_types", None)
    everywhere = kinds is None or all(kind == "sliding_attention" for kind in kinds)
    inner.cache_config.sliding_window = getattr(text, "sliding_window", None) if everywhere else None
    inner.compilation_config = copy.copy(outer.compilation_config)
    # Two members of one shape must not share a compiled graph: it names one member's layers. This enters its key.
    inner.additional_config = {**outer.additional_config, "tessellm_member": name}
    return inner


class InnerMember(nn.Module):
    """One inner model and the members that run in it: a full member alone, or the base and its adapters."""

    def __init__(self, outer: Any, hf_config: PreTrainedConfig, name: str):
        super().__init__()
        self.names = [name]
        self.config = inner_config(outer, hf_config, name)
        self.hidden_size: int = get_hf_text_config(hf_config).hidden_size
        self.model = build(self.config, name)
        self.adapters: list[Adapter] = []
        self.most_tokens: int = outer.scheduler_config.max_num_batched_tokens
        self.inputs = StaticInputs(self.most_tokens)

    def adopt(self, adapters: Iterable[Adapter]) -> None:
        """Let adapters run as rows of this model, those that can: LoRA of its linear layers, in a model where nothing
        but attention looks across rows."""
        layers = [layer for layer in self.model.modules() if isinstance(layer, AttentionLayerBase)]
        if not all(type(layer) is Attention for layer in layers):
            return
        self.adapters = [adapter for adapter in adapters if fits(self.model, adapter)]
        if not self.adapters:
            return
        self.names += [adapter.name for adapter in self.adapters]
        rows = len(self.names) * self.most_tokens
        self.inputs = StaticInputs(rows)
        compilation = self.config.compilation_config
        compilation.compile_ranges_endpoints = [*(compilation.compile_ranges_endpoints or []), rows]
        self.config.additional_config["tessellm_rows"] = [adapter.signature for adapter in self.adapters]
        twins = [self._attention_of(build(self.config, name, torch.device("meta"))) for name in self.names[1:]]
        for path, attention in self._attention_of(self.model).items():
            parent, _, leaf = path.rpartition(".")
            own = [attention, *(twin[path] for twin in twins)]
            setattr(self.model.get_submodule(parent), leaf, RowsAttention(own))

    @staticmethod
    def _attention_of(model: nn.Module) -> dict[str, Attention]:
        return {path: layer for path, layer in model.named_modules() if isinstance(layer, Attention)}

    def forward(self, ids_M: Sequence[Tensor], positions: Tensor) -> list[Tensor]:
        """Every member's hidden states [T, H]."""
        rows: Tensor = self.model(*self.inputs.fill(ids_M, positions))
        return list(rows.chunk(len(self.names)))

    def logits(self, hidden_M: Sequence[Tensor]) -> list[Tensor] | None:
        """Every member's logits over its own vocabulary; None on ranks that do not gather them."""
        rows = hidden_M[0] if len(hidden_M) == 1 else torch.cat(list(hidden_M))
        logits = self.model.compute_logits(rows)
        return None if logits is None else list(logits.chunk(len(hidden_M)))

    def load(self, files: Iterable[Path]) -> set[str]:
        """Load the weights; returns the names of the parameters that got one."""
        names = [str(file) for file in files]
        loaded = self.model.load_weights(safetensors_weights_iterator(names, use_tqdm_on_load=False))
        missing = sorted(name for name, _ in self.model.named_parameters() if name not in loaded)
        if missing:
            raise MemberError(
                f"member {self.names[0]!r}: {Path(names[0]).parent} lacks {len(missing)} tensors of a "
                f"{type(self.model).__name__}, first {missing[0]}"
            )
        if self.adapters:
            attach(self.model, [None, *self.adapters])
        return {name for name, _ in self.named_parameters()}


class StaticInputs:
    """The tokens and positions of an inner model: always in the same memory, since a CUDA graph reads where it was
    captured."""

    def __init__(self, rows: int):
        self.ids = torch.zeros(rows, dtype=torch.long)
        self.positions = torch.zeros(rows, dtype=torch.long)

    def fill(self, ids_M: Sequence[Tensor], positions: Tensor) -> tuple[Tensor, Tensor]:
        """Every member's tokens one after the other, and as often the positions."""
        rows = len(ids_M) * len(positions)
        for part, ids in zip(self.ids[:rows].chunk(len(ids_M)), ids_M, strict=True):
            part.copy_(ids)
        self.positions[:rows].view(len(ids_M), -1).copy_(positions)
        return self.ids[:rows], self.positions[:rows]


def run_members(
    members: Iterable[InnerMember], ids_of: Callable[[str], Tensor], positions: Tensor, output_TH: Tensor
) -> None:
    """Write all members' hidden states side by side. Each is copied before the next runs: graphs share their memory."""
    column = 0
    for member in members:
        for hidden_TH in member([ids_of(name) for name in member.names], positions):
            output_TH[:, column : column + hidden_TH.shape[1]] = hidden_TH
            column += hidden_TH.shape[1]


def build(config: Any, name: str, device: torch.device | None = None) -> Any:
    """An inner model whose layers are named after the member. On "meta" it costs no memory."""
    with set_model_tag(name), device or torch.get_default_device():
        return init_vllm_registered_model(vllm_config=config, prefix=name)


class RowsAttention(nn.Module):
    """Attention over the rows of several members, each in a cache of its own."""

    def __init__(self, layers: Sequence[Attention]):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        for layer in layers[1:]:
            _take_tensors(layer, layers[0])

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        parts = [tensor.chunk(len(self.layers)) for tensor in (query, key, value)]
        return torch.cat([layer(*rows, **options) for layer, *rows in zip(self.layers, *parts, strict=True)])


def _take_tensors(layer: nn.Module, twin: nn.Module) -> None:
    """Give a layer that was built on "meta" its twin's tensors: scales and the like."""
    for name, module in layer.named_modules():
        real = twin.get_submodule(name)
        for holder in (module._buffers, module._parameters, module.__dict__):
            for key, tensor in holder.items():
                if isinstance(tensor, Tensor) and tensor.is_meta:
                    holder[key] = getattr(real, key)
    for key, tensor in vars(layer.impl).items():
        if isinstance(tensor, Tensor) and tensor.is_meta:
            setattr(layer.impl, key, getattr(twin.impl, key))


def merged_checkpoint(places: Mapping[str, Source], name: str, dtype: torch.dtype) -> tempfile.TemporaryDirectory:
    """A full checkpoint of an adapter that cannot share its base, merged by PEFT; it lives as long as it is held."""
    loading = Loading(dtype=dtype)
    base = load_member("base", MemberSpec(places["base"].directory), None, loading)
    member = load_member(name, MemberSpec(places[name].directory, any_base=True), base, loading)
    model = vars(member.model)["_peft_model"].merge_and_unload() if member.is_adapter else member.model
    folder = tempfile.TemporaryDirectory(prefix="tessellm-merged-")
    model.save_pretrained(folder.name)
    return folder
