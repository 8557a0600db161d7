"""Compositions to measure: random weights in the shapes of known models, or the first experts of a given composition.

Speed does not depend on what the weights are, so nothing is downloaded.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, PreTrainedModel

from tessellm.compose import compose
from tessellm.engine.members.low_rank import LowRank
from tessellm.errors import EngineError, nearest
from tessellm.members.adapters import share
from tessellm.model import ComposedForCausalLM
from tessellm.rules import FunctionRule, first_member

RANK = 16
KINDS = ("full", "lora")
SHAPES: dict[str, Callable[[], Any]] = {
    "gemma-2-2b": lambda: Gemma2Config(eos_token_id=1),
    "gemma-tiny": lambda: Gemma2Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        sliding_window=64,
        eos_token_id=1,
    ),
    "llama-512": lambda: llama(32_000, 512, 1376, 8, 8, 8192),
    "llama-384": lambda: llama(16_000, 384, 1024, 6, 6, 512),
    "llama-tiny": lambda: llama(256, 32, 64, 2, 4, 512),
}


def llama(vocab_size: int, hidden: int, intermediate: int, layers: int, heads: int, context: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=context,
    )


def random_composition(
    shape: str,
    experts: int,
    kind: str = "full",
    rule: str = "product",
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    layers: int | None = None,
) -> ComposedForCausalLM:
    """A base and experts with random weights: full models of their own, or low-rank deltas on all linear layers.
    `layers`: fewer than the shapes have, for a quick look."""
    if shape not in SHAPES:
        raise EngineError(f"unknown shapes {shape!r}; {nearest(shape, SHAPES)}")
    if kind not in KINDS:
        raise EngineError(f"unknown kind of expert {kind!r}; {nearest(kind, KINDS)}")
    if experts < 1:
        raise EngineError(f"expected at least one expert; got {experts}")
    torch.manual_seed(seed)
    base = _random_model(shape, device, dtype, layers)
    make = {"full": lambda: _random_model(shape, device, dtype, layers), "lora": lambda: with_deltas(base)}[kind]
    return compose(base, {f"expert{n}": make() for n in range(1, experts + 1)}, rule=rule)


def _random_model(shape: str, device: str, dtype: torch.dtype, layers: int | None) -> PreTrainedModel:
    config = SHAPES[shape]()
    if layers is not None:
        config.num_hidden_layers = layers
        config.layer_types = (getattr(config, "layer_types", None) or [])[:layers] or None
    try:
        with torch.device(device):
            return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built for the device
        raise EngineError(f"no model can be made on the device {device!r}: {str(error).splitlines()[0]}") from error


def with_deltas(base: PreTrainedModel, rank: int = RANK) -> PreTrainedModel:
    """The base with a random low-rank delta on every linear layer but the output."""
    expert: Any = share(base)
    output = expert.get_output_embeddings()
    for path, layer in list(expert.named_modules()):
        if isinstance(layer, nn.Linear) and layer is not output:
            weight = layer.weight
            down_RI = weight.new_empty(rank, layer.in_features).normal_(0, layer.in_features**-0.5)
            up_OR = weight.new_empty(layer.out_features, rank).normal_(0, 0.02)
            expert.set_submodule(path, LowRank(layer, down_RI, up_OR))
    return expert


def base_alone(model: ComposedForCausalLM) -> ComposedForCausalLM:
    """The base by itself, around the same tensors: what a composition is compared with."""
    config: Any = copy.deepcopy(model.config)
    config.members = config.members[:1]
    rule = FunctionRule("one member", first_member)
    return ComposedForCausalLM(config, {"base": model.base}, {"base": model.alignments["base"]}, rule)


def first_experts(model: ComposedForCausalLM, count: int) -> ComposedForCausalLM:
    """The same composition with only its first experts, around the same tensors."""
    names = list(model.members)[: count + 1]
    if len(names) != count + 1 or count < 1:
        raise EngineError(f"expected 1 to {len(model.members) - 1} experts; got {count}")
    config: Any = copy.deepcopy(model.config)
    config.members = config.members[: count + 1]
    return ComposedForCausalLM(
        config, {name: model.member(name) for name in names}, {name: model.alignments[name] for name in names}
    )
