"""Compositions that the fused kernels know, one group of members over one cache, and what the modules say of it. Their
kernels run in Triton's interpreter, on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import tessellm
from tessellm.engine.cuda.fused.decoder import FusedDecoder, fuse
from tessellm.engine.cuda.slot_pass import RowOrder, TokenBatch, member_logits
from tessellm.engine.members.groups import make_groups

from conftest import build_model, perturbed, save_lora, save_member

SIZES: dict[str, Any] = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 96, "vocab_size": 80}


def composition(kind: str, folder: Path, layers: int = 2) -> Any:
    """Three members, of which the base is one."""
    sizes = {**SIZES, "num_hidden_layers": layers}
    if kind == "adapters":
        home = save_member(build_model("llama", **sizes), folder / "base")
        everywhere = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        some = {"e1": ["q_proj", "up_proj"], "e2": everywhere}
        paths = {name: str(save_lora(home, folder / name, 3, target_modules=t)) for name, t in some.items()}
        return tessellm.compose(str(home), paths, rule="product")
    settings = {"attn_implementation": "eager"} if kind == "gemma2" else {}
    base = build_model(kind, **sizes, **settings)
    if kind == "qwen2":
        for name, parameter in base.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter)
    return tessellm.compose(base, {"e1": perturbed(base, 1), "e2": perturbed(base, 2)}, rule="product")


def grouped(composed: Any, slots: int, cells: int) -> tuple[Any, FusedDecoder]:
    """All members as one group, and the fused step over its cache."""
    (group,) = make_groups(composed, slots=slots, cells=cells, stacked=True)
    fused = fuse([composed.member(name) for name in composed.members], group.cache)
    assert fused is not None
    return group, fused


def by_modules(group: Any, token_BT: torch.Tensor, position_BT: torch.Tensor, cells: int, keep: int) -> Any:
    """Logits of rows that are the first slots."""
    slot_B = torch.arange(len(token_BT))
    return member_logits([group], TokenBatch(token_BT, position_BT, slot_B, cells, keep, RowOrder.FIRST_SLOTS))


def feed(group: Any, lengths: list[int]) -> None:
    """A text of each length into a slot each, by the modules."""
    for slot, length in enumerate(lengths):
        text = torch.randint(4, 60, (1, length), generator=torch.Generator().manual_seed(slot))
        member_logits([group], TokenBatch(text, torch.arange(length)[None], torch.tensor([slot]), length, 1))
