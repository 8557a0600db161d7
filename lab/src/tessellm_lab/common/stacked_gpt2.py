"""The paper's letter models, many in one computation: GPT-2 blocks with a leading member axis (see `stacked`).

Learned positions, layer norms, GELU, tied embeddings and dropout as in `GPT2LMHeadModel`; `to_gpt2` gives one back.

Shapes: E member, B batch, T time, D width, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .stacked import Params, Shape, mix

DROPOUT = 0.1
EPSILON = 1e-5
LINEAR = {"attn.c_attn": (1, 3), "attn.c_proj": (1, 1), "mlp.c_fc": (1, 4), "mlp.c_proj": (4, 1)}


def initialise_gpt2(shape: Shape, members: int, generator: torch.Generator) -> Params:
    """Random parameters, named as in transformers."""
    device, width = generator.device, shape.width

    def normal(*size: int, std: float = 0.02) -> Tensor:
        return torch.randn(members, *size, generator=generator, device=device) * std

    def norm(name: str) -> Params:
        weight = torch.ones(members, width, device=device)
        return {f"{name}.weight": weight, f"{name}.bias": torch.zeros_like(weight)}

    params = {"wte.weight": normal(shape.vocabulary, width), "wpe.weight": normal(shape.context, width)}
    for layer in range(shape.layers):
        params |= norm(f"h.{layer}.ln_1") | norm(f"h.{layer}.ln_2")
        for name, (rows, columns) in LINEAR.items():
            std = 0.02 / (2 * shape.layers) ** 0.5 if name.endswith("c_proj") else 0.02
            params[f"h.{layer}.{name}.weight"] = normal(rows * width, columns * width, std=std)
            params[f"h.{layer}.{name}.bias"] = torch.zeros(members, columns * width, device=device)
    return params | norm("ln_f")


def logits_gpt2(
    params: Params, shape: Shape, tokens_EBT: Tensor, dtype: torch.dtype = torch.float32, training: bool = False
) -> Tensor:
    """[E, B, T, V] in float32; with dropout if training."""
    e, b, t = tokens_EBT.shape
    drop = DROPOUT if training else 0.0

    def linear(x: Tensor, name: str) -> Tensor:
        return mix(x, params[f"{name}.weight"]) + params[f"{name}.bias"][:, None, None].to(dtype)

    def norm(x: Tensor, name: str) -> Tensor:
        x = functional.layer_norm(x, (shape.width,), eps=EPSILON)
        return x * params[f"{name}.weight"][:, None, None] + params[f"{name}.bias"][:, None, None]

    x = mix(functional.one_hot(tokens_EBT, shape.vocabulary).to(dtype), params["wte.weight"])
    x = functional.dropout(x + params["wpe.weight"][:, None, :t].to(dtype), drop, training)
    for layer in range(shape.layers):
        at = f"h.{layer}"
        qkv = linear(norm(x, f"{at}.ln_1"), f"{at}.attn.c_attn").view(e * b, t, 3, shape.heads, -1)
        q, k, v = (part.squeeze(2).transpose(1, 2) for part in qkv.split(1, 2))
        o = functional.scaled_dot_product_attention(q, k, v, dropout_p=drop, is_causal=True)
        o = linear(o.transpose(1, 2).reshape(e, b, t, -1), f"{at}.attn.c_proj")
        x = x + functional.dropout(o, drop, training)
        h = functional.gelu(linear(norm(x, f"{at}.ln_2"), f"{at}.mlp.c_fc"), approximate="tanh")
        x = x + functional.dropout(linear(h, f"{at}.mlp.c_proj"), drop, training)
    return mix(norm(x, "ln_f"), params["wte.weight"].mT).float()


def to_gpt2(params: Params, shape: Shape, member: int) -> Any:
    """One member as a `transformers.GPT2LMHeadModel`."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=shape.vocabulary, n_positions=shape.context, n_embd=shape.width, n_layer=shape.layers,
        n_head=shape.heads, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    state = {f"transformer.{name}": p[member].float().cpu().contiguous() for name, p in params.items()}
    model.load_state_dict(state | {"lm_head.weight": state["transformer.wte.weight"]}, strict=True)
    return model.eval()
