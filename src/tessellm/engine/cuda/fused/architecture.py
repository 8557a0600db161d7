"""Read off Hugging Face modules what the fused step must know of their architecture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

FAMILIES = ("llama", "mistral", "qwen2", "gemma2")
ACTIVATIONS = {"silu": 1, "gelu_pytorch_tanh": 2}
FIXED_ROPE = ("default", "linear", "llama3", "yarn")  # others depend on the length of the text


@dataclass(frozen=True)
class Architecture:
    """Sizes and constants that all members of a group have in common."""

    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    activation: int
    eps: float
    gain_offset: float  # Gemma's norms multiply by 1 + gain
    post_norms: bool  # Gemma 2 also normalises what a block adds
    embedding_scale: float
    scaling: float
    softcap: float | None
    final_softcap: float | None
    windows: tuple[int | None, ...]  # per layer

    @property
    def layers(self) -> int:
        return len(self.windows)


def read_architecture(member: Any) -> Architecture | None:
    """Read a member's architecture; None if its steps cannot be fused."""
    config = member.config
    activation = ACTIVATIONS.get(str(getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)))
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if config.model_type not in FAMILIES or activation is None or rope not in FIXED_ROPE:
        return None
    first = member.model.layers[0].self_attn
    size = first.head_dim
    if size < 32 or size & (size - 1) or not isinstance(getattr(first.q_proj, "base_layer", first.q_proj), nn.Linear):
        return None
    gemma = config.model_type == "gemma2"
    sdpa = config._attn_implementation == "sdpa"  # which leaves soft caps out, in the reference
    return Architecture(
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_size=size,
        vocabulary=config.vocab_size,
        activation=activation,
        eps=config.rms_norm_eps,
        gain_offset=1.0 if gemma else 0.0,
        post_norms=gemma,
        embedding_scale=float(torch.tensor(config.hidden_size**0.5, dtype=member.dtype)) if gemma else 1.0,
        scaling=first.scaling,
        softcap=config.attn_logit_softcapping if gemma and not sdpa else None,
        final_softcap=getattr(config, "final_logit_softcapping", None),
        windows=tuple(
            getattr(layer.self_attn, "sliding_window", None) or _window(config) for layer in member.model.layers
        ),
    )


def _window(config: Any) -> int | None:
    return getattr(config, "sliding_window", None) if config.model_type == "mistral" else None


def rotations(member: Any, context: int) -> tuple[Tensor, Tensor]:
    """Compute cosines and sines per position, rounded as the member does: [context, head size / 2] in float32."""
    like = torch.zeros(1, 1, 1, dtype=member.dtype, device=member.device)
    position = torch.arange(context, device=member.device)[None]
    cos, sin = member.model.rotary_emb(like, position)
    half = cos.shape[-1] // 2
    return cos[0, :, :half].float().contiguous(), sin[0, :, :half].float().contiguous()
