"""Members: a base, and experts fine-tuned from it, whole or as low-rank deltas; both experts in one computation.

An expert learns its own skill's tokens from right texts, and at every other token to say what the base says: the
paper's condition (Def. 4: an expert is the base where it is idle), asked for while training.

    E members   B texts   T tokens   V vocabulary   D in   F out   R rank   P projections beside one another
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..common.stacked import Params, Shape, initialise, logits, select, train
from ..common.steps import Steps
from .texts import READERS
from .tokens import NOTHING, Texts

EXPERTS = READERS[1:]
PROJECTIONS = {  # of the stacked layers, and what a Llama calls them
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
LORA_SCALE = 2.0  # PEFT's lora_alpha / r
QUARTER = 0.25  # of the texts, by length: a batch comes from so many


@dataclass(frozen=True)
class Stage:
    """One training: whichever ends first, its steps or its seconds."""

    steps: int
    batch: int
    rate: float
    seconds: float


class Draw:
    """Batches for several readers at once, their texts from the same quarter of the lengths."""

    def __init__(self, texts: Sequence[Texts], batch: int, generator: torch.Generator):
        device = generator.device
        self.texts = [
            texts._replace(tokens_NT=texts.tokens_NT.to(device), owner_NT=texts.owner_NT.to(device)) for texts in texts
        ]
        self.batch, self.device = batch, device
        self.rng = random.Random(generator.initial_seed())  # on the CPU: a number from the device makes it wait

    def __call__(self) -> tuple[Tensor, Tensor]:
        """Tokens and their owners: [E, B, T] each."""
        where, rows, width = self.rng.random() * (1 - QUARTER), [], 0
        for texts in self.texts:
            count = len(texts.length_N)
            own = [int((where + QUARTER * self.rng.random()) * count) for _ in range(self.batch)]
            width = max(width, *(texts.length_N[row] for row in own))
            rows.append(torch.tensor(own).to(self.device, non_blocking=True))
        tokens, owners = [], []
        for texts, rows_B in zip(self.texts, rows, strict=True):
            tokens.append(_wide(texts.tokens_NT[rows_B, :width].long(), width, 0))
            owners.append(_wide(texts.owner_NT[rows_B, :width].long(), width, NOTHING))
        return torch.stack(tokens), torch.stack(owners)


def _wide(rows_BT: Tensor, width: int, value: int) -> Tensor:
    return functional.pad(rows_BT, (0, width - rows_BT.shape[1]), value=value)


def train_base(shape: Shape, texts: Texts, stage: Stage, generator: torch.Generator, report: Steps) -> Params:
    """From scratch, on every token of its texts."""
    draw = Draw([texts], stage.batch, generator)

    def batch() -> tuple[Tensor, Tensor, Tensor]:
        tokens_EBT, owner_EBT = draw()
        return tokens_EBT[..., :-1], tokens_EBT[..., 1:], (owner_EBT[..., 1:] != NOTHING).float()

    dtype = _dtype(generator)
    return train(
        initialise(shape, 1, generator), shape, batch, stage.steps, stage.rate, report,
        dtype=dtype, seconds=stage.seconds,
    )  # fmt: skip


def expert_loss(
    weights: Params, base: Params, shape: Shape, tokens_EBT: Tensor, owner_EBT: Tensor, dtype: torch.dtype
) -> Tensor:
    """Cross-entropy of own tokens and KL(base ‖ expert) at the others, each a mean: [E]."""
    inputs, targets, owner = tokens_EBT[..., :-1], tokens_EBT[..., 1:], owner_EBT[..., 1:]
    logp_EBTV = logits(weights, shape, inputs, dtype).log_softmax(-1)
    with torch.no_grad():
        base_EBTV = logits(base, shape, inputs, dtype).log_softmax(-1)
    me_E11 = torch.arange(1, len(owner) + 1, device=owner.device)[:, None, None]
    own_EBT, other_EBT = owner == me_E11, (owner != me_E11) & (owner != NOTHING)
    nll_EBT = -logp_EBTV.gather(-1, targets[..., None])[..., 0]
    kl_EBT = (base_EBTV.exp() * (base_EBTV - logp_EBTV)).sum(-1)
    return _mean(nll_EBT, own_EBT) + _mean(kl_EBT, other_EBT)


def _mean(value_EBT: Tensor, where_EBT: Tensor) -> Tensor:
    return (value_EBT * where_EBT).sum((1, 2)) / where_EBT.sum((1, 2)).clamp(min=1)


def train_experts(
    base: Params, shape: Shape, texts: Mapping[str, Texts], stage: Stage, generator: torch.Generator, report: Steps,
    rank: int | None = None,
) -> Params:  # fmt: skip
    """Both experts: all of their weights, or where a rank is given, low-rank deltas (see `with_deltas`)."""
    draw = Draw([texts[name] for name in EXPERTS], stage.batch, generator)
    twice, dtype = select(base, [0] * len(EXPERTS)), _dtype(generator)
    start = twice if rank is None else initial_deltas(twice, shape, rank, generator)

    def loss(params: Params, tokens_EBT: Tensor, owner_EBT: Tensor) -> Tensor:
        weights = params if rank is None else with_deltas(twice, params)
        return expert_loss(weights, twice, shape, tokens_EBT, owner_EBT, dtype)

    return train(
        start, shape, draw, stage.steps, stage.rate, report, seconds=stage.seconds, loss=loss,
    )  # fmt: skip


def initial_deltas(weights: Params, shape: Shape, rank: int, generator: torch.Generator) -> Params:
    """Down and up maps of every linear layer; up maps are zero, so nothing changes yet."""
    deltas = {}
    for layer in range(shape.layers):
        for name, parts in PROJECTIONS.items():
            members, inputs, outputs = weights[f"{layer}.{name}"].shape
            size = (members, len(parts), inputs, rank)
            down = torch.randn(size, generator=generator, device=generator.device) * inputs**-0.5
            deltas[f"{layer}.{name}.down"] = down
            deltas[f"{layer}.{name}.up"] = down.new_zeros(members, len(parts), rank, outputs // len(parts))
    return deltas


def with_deltas(weights: Params, deltas: Params) -> Params:
    """Members whose linear layers are the base's plus their low-rank deltas."""
    made = dict(weights)
    for key in [key.removesuffix(".down") for key in deltas if key.endswith(".down")]:
        delta_EPDF = deltas[f"{key}.down"] @ deltas[f"{key}.up"]
        made[key] = weights[key] + LORA_SCALE * delta_EPDF.transpose(1, 2).flatten(2)
    return made


def adapter_tensors(deltas: Params, shape: Shape, member: int) -> dict[str, Tensor]:
    """One expert's deltas under PEFT's names."""
    named = {}
    for layer in range(shape.layers):
        for name, parts in PROJECTIONS.items():
            for number, part in enumerate(parts):
                at = f"base_model.model.model.layers.{layer}.{part}"
                for half, called in (("down", "lora_A"), ("up", "lora_B")):
                    weight = deltas[f"{layer}.{name}.{half}"][member, number]
                    named[f"{at}.{called}.weight"] = weight.T.contiguous().cpu()
    return named


def adapter_config(rank: int, base: str) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": LORA_SCALE * rank,
        "target_modules": [part.split(".")[1] for parts in PROJECTIONS.values() for part in parts],
    }


def _dtype(generator: torch.Generator) -> torch.dtype:
    return torch.bfloat16 if generator.device.type == "cuda" else torch.float32
