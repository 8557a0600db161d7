"""FusedDecoder: one decoding step of a group of members, as a few launches a layer, over the group's SlotCache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from transformers import PreTrainedModel

from ..slots import SlotCache
from .architecture import Architecture, read_architecture, rotations
from .attention_kernel import attention_kernel, combine_kernel
from .kernels import embed_kernel, residual_kernel
from .layers import BLOCK_N, TYPES, FusedLinear, addresses

CELLS_A_SPLIT = 128
MOST_SPLITS = 32
MOST_ROWS = 64  # of one weight; beyond it, a matrix product of the library's is faster


class FusedDecoder:
    """Token ids and positions to logits: [members, slots, vocabulary] in float32."""

    def __init__(self, members: Sequence[Any], cache: SlotCache, architecture: Architecture):
        one = members[0]
        self.architecture, self.cache, self.members = architecture, cache, len(members)
        self.device, self.dtype = one.device, one.dtype
        self.embeddings = addresses([member.model.embed_tokens.weight for member in members], self.device)
        self.cos, self.sin = rotations(one, cache.cells)
        self.layers = [self._layer([member.model.layers[i] for member in members]) for i in range(architecture.layers)]
        self.norm = addresses([member.model.norm.weight for member in members], self.device)
        self.head = FusedLinear(
            [[member.lm_head] for member in members], cap=architecture.final_softcap, out_dtype=torch.float32
        )
        self.shared = self.head.shared
        self._kept = members

    def _layer(self, layers: Sequence[Any]) -> dict[str, Any]:
        post = self.architecture.post_norms
        attention, mlp = [layer.self_attn for layer in layers], [layer.mlp for layer in layers]
        names = {
            "before": "input_layernorm",
            "between": "pre_feedforward_layernorm" if post else "post_attention_layernorm",
        }
        if post:
            names |= {"after attention": "post_attention_layernorm", "after mlp": "post_feedforward_layernorm"}
        gains = {
            place: addresses([getattr(layer, name).weight for layer in layers], self.device)
            for place, name in names.items()
        }
        return gains | {
            "qkv": FusedLinear([[a.q_proj, a.k_proj, a.v_proj] for a in attention], splits=True),
            "o": FusedLinear([[a.o_proj] for a in attention], splits=True),
            "mlp": FusedLinear([[m.gate_proj, m.up_proj] for m in mlp], glu=self.architecture.activation),
            "down": FusedLinear([[m.down_proj] for m in mlp], splits=True),
        }

    def takes(self, slots: int, steps: int) -> bool:
        """Whether a pass of this size is one for it: single steps of not too many rows."""
        return steps == 1 and slots * (self.members if self.shared else 1) <= MOST_ROWS

    def __call__(self, token_MB: Tensor, position_B: Tensor, cells: int) -> Tensor:
        a, members, slots = self.architecture, *token_MB.shape
        x, h = (torch.empty(members, slots, a.hidden, dtype=self.dtype, device=self.device) for _ in range(2))
        sizes: dict[str, Any] = {
            "K": a.hidden,
            "BLOCK_K": triton.next_power_of_2(a.hidden),
            "WEIGHT": TYPES[self.dtype],
        }
        embed_kernel[(slots, members)](
            token_MB, self.embeddings, self.layers[0]["before"], x, h, slots, a.embedding_scale, slots, a.eps,
            a.gain_offset, **sizes,
        )  # fmt: skip

        def add(y: Tensor, post: Tensor | None, following: Tensor) -> None:
            """x += y, and h = norm(x) for what comes next."""
            residual_kernel[(members * slots,)](
                x, y, h, following if post is None else post, following, members * slots, slots, a.eps, a.gain_offset,
                SPLITS=y.shape[0], POST=post is not None, **sizes,
            )  # fmt: skip

        for index, layer in enumerate(self.layers):
            last = index + 1 == a.layers
            found = self._attend(index, layer["qkv"](h), position_B, cells)
            add(layer["o"](found), layer.get("after attention"), layer["between"])
            following = self.norm if last else self.layers[index + 1]["before"]
            add(layer["down"](layer["mlp"](h)[0]), layer.get("after mlp"), following)
        return self.head(h)[0]

    def _attend(self, index: int, qkv: Tensor, position_B: Tensor, cells: int) -> Tensor:
        a, members, slots = self.architecture, *qkv.shape[1:3]
        key, value = self.cache.key_RHCD[index], self.cache.value_RHCD[index]
        rows, group = members * slots, max(16, triton.next_power_of_2(a.heads // a.kv_heads))
        splits = max(1, min(MOST_SPLITS, -(-cells // CELLS_A_SPLIT)))
        found = torch.empty(members, slots, a.heads * a.head_size, dtype=self.dtype, device=self.device)
        parts = torch.empty(3, rows * a.kv_heads * splits * group, device=self.device)
        part_found = torch.empty(rows * a.kv_heads * splits * group, a.head_size, device=self.device)
        window, settings = a.windows[index], {"GROUP": group, "CACHE": TYPES[self.dtype]}
        sizes = {"HEADS": a.heads, "KV_HEADS": a.kv_heads, "D": a.head_size, "SPLITS": splits}
        attention_kernel[(rows, a.kv_heads, splits)](
            qkv, key, value, position_B, self.cos, self.sin, found, parts[0], parts[1], part_found,
            rows, slots, members, self.cache.cells, key.stride(2), key.stride(1), key.stride(0), window or 0, a.scaling,
            a.softcap or 1.0, -(-cells // splits // 32) * 32 if splits > 1 else cells,
            BLOCK_C=32, WINDOW=window is not None, SOFTCAP=a.softcap is not None,
            IN_SPLITS=qkv.shape[0], **sizes, **settings,
        )  # fmt: skip
        if splits > 1:
            combine_kernel[(rows, a.heads)](
                parts[0], parts[1], part_found, found, PADDED_SPLITS=triton.next_power_of_2(splits), **sizes, **settings
            )
        return found


def fuse(members: Sequence[PreTrainedModel], cache: SlotCache) -> FusedDecoder | None:
    """A fused decoder for these members, or None where their architecture, sizes or adapters are not ones it knows."""
    architectures = {read_architecture(member) for member in members}
    architecture = architectures.pop()
    if architectures or architecture is None or architecture.hidden % BLOCK_N or architecture.vocabulary % BLOCK_N:
        return None
    try:
        return FusedDecoder(members, cache, architecture)
    except (AttributeError, ValueError):  # a layer with deltas that cannot be batched
        return None
