"""FusedDecoder: a decoding step of a group of members, or a pass over a few tokens of each sequence, over the group's
SlotCache. A few launches a layer."""

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
MOST_ROWS_OF_SEVERAL = 256  # when drafts are verified, and the modules would launch ten times as much
MOST_TOKENS = 9  # of one sequence
MOST_QUERIES = 128  # of one program: more do not fit into its registers


class FusedDecoder:
    """Token ids and positions to logits: [members, slots, tokens, vocabulary] in float32."""

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

    def takes(self, slots: int, tokens: int) -> bool:
        """Whether a pass of this size is one for it: not too many rows, and few tokens of each sequence."""
        rows = slots * tokens * (self.members if self.shared else 1)
        fits = self._queries(tokens) <= MOST_QUERIES and tokens <= MOST_TOKENS
        return fits and rows <= (MOST_ROWS if tokens == 1 else MOST_ROWS_OF_SEVERAL)

    def __call__(self, token_MBT: Tensor, position_BT: Tensor, cells: int) -> Tensor:
        """A sequence's real tokens come first, at positions that follow one another; padding, at −1, behind them."""
        a, members, slots, tokens = self.architecture, *token_MBT.shape
        count, position_BT = slots * tokens, position_BT.contiguous()  # rows of a member
        x, h = (torch.empty(members, count, a.hidden, dtype=self.dtype, device=self.device) for _ in range(2))
        sizes: dict[str, Any] = {
            "K": a.hidden,
            "BLOCK_K": triton.next_power_of_2(a.hidden),
            "WEIGHT": TYPES[self.dtype],
        }
        embed_kernel[(count, members)](
            token_MBT.contiguous(), self.embeddings, self.layers[0]["before"], x, h, count, a.embedding_scale, count,
            a.eps, a.gain_offset, **sizes,
        )  # fmt: skip

        def add(y: Tensor, post: Tensor | None, following: Tensor) -> None:
            """x += y, and h = norm(x) for what comes next."""
            residual_kernel[(members * count,)](
                x, y, h, following if post is None else post, following, members * count, count, a.eps, a.gain_offset,
                SPLITS=y.shape[0], POST=post is not None, **sizes,
            )  # fmt: skip

        for index, layer in enumerate(self.layers):
            last = index + 1 == a.layers
            found = self._attend(index, layer["qkv"](h), position_BT, cells)
            add(layer["o"](found), layer.get("after attention"), layer["between"])
            following = self.norm if last else self.layers[index + 1]["before"]
            add(layer["down"](layer["mlp"](h)[0]), layer.get("after mlp"), following)
        return self.head(h)[0].unflatten(1, (slots, tokens))

    def _queries(self, tokens: int) -> int:
        """Of one sequence that share keys and values, padded to what matrix units take."""
        return max(16, triton.next_power_of_2(tokens * self.architecture.heads // self.architecture.kv_heads))

    def _attend(self, index: int, qkv: Tensor, position_BT: Tensor, cells: int) -> Tensor:
        a, members, (slots, tokens) = self.architecture, qkv.shape[1], position_BT.shape
        key, value = self.cache.key_RHCD[index], self.cache.value_RHCD[index]
        sequences, queries = members * slots, self._queries(tokens)
        splits = max(1, min(MOST_SPLITS, -(-cells // CELLS_A_SPLIT)))
        found = torch.empty(members, slots * tokens, a.heads * a.head_size, dtype=self.dtype, device=self.device)
        parts = torch.empty(2, sequences * a.kv_heads * splits * queries, device=self.device)
        part_found = torch.empty(sequences * a.kv_heads * splits * queries, a.head_size, device=self.device)
        window, settings = a.windows[index], {"TOKENS": tokens, "QUERIES": queries, "CACHE": TYPES[self.dtype]}
        sizes = {"HEADS": a.heads, "KV_HEADS": a.kv_heads, "D": a.head_size, "SPLITS": splits}
        attention_kernel[(sequences, a.kv_heads, splits)](
            qkv, key, value, position_BT, self.cos, self.sin, found, parts[0], parts[1], part_found,
            sequences * tokens, slots, members, self.cache.cells, key.stride(2), key.stride(1), key.stride(0),
            window or 0, a.scaling, a.softcap or 1.0, -(-cells // splits // 32) * 32 if splits > 1 else cells,
            BLOCK_C=32, WINDOW=window is not None, SOFTCAP=a.softcap is not None,
            IN_SPLITS=qkv.shape[0], num_stages=3 if self.dtype.itemsize == 2 else 2, **sizes, **settings,
        )  # fmt: skip
        if splits > 1:
            combine_kernel[(sequences * tokens, a.heads)](
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
