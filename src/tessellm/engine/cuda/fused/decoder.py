"""FusedDecoder: run a decoding step of a group of members, or a pass over a few tokens per sequence, over the group's
SlotCache, with a few launches per layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from transformers import PreTrainedModel

from ...members.attention import SlotCache
from ...members.low_rank import read_low_rank
from .addresses import BLOCK_N, addresses
from .architecture import Architecture, read_architecture, rotations
from .attention_kernel import attention_kernel, combine_kernel
from .kernels import embed_kernel, residual_kernel
from .layers import MULTIPROCESSORS, TYPES, FusedLinear
from .low import Low
from .overlap import overlapping
from .products import mlp_product, product
from .prompts import PromptPass

CELLS_PER_SPLIT = 128
FEWER_CELLS = 64  # cells per split, where programs are too few for all multiprocessors
MOST_SPLITS = 32
MOST_ROWS = 256  # rows per weight: of more, the modules are faster, though they launch ten times as much
FEW_ROWS = 16  # rows for which a norm is repeated by several programs, each with some of the deltas' low-rank input
PIECE = 4  # numbers of that input per program
MOST_TOKENS = 32  # tokens per sequence
FEW_QUERIES = 16  # queries per program, which may then read more cells at once, if it has a multiprocessor to itself
MANY_TOKENS = 16  # tokens per sequence that a launch of their own puts into the cache: one program would take turns
MANY_NUMBERS = 1 << 14  # of a program's queries, which need the registers of twice as many threads
MOST_QUERIES = 128  # queries per program: more do not fit into its registers


class FusedDecoder:
    """Token ids and positions to logits: [members, slots, tokens, vocabulary] in float32."""

    def __init__(self, members: Sequence[Any], cache: SlotCache, architecture: Architecture):
        one = members[0]
        self.architecture, self.cache, self.members = architecture, cache, len(members)
        self.device, self.dtype = one.device, one.dtype
        self.embeddings = addresses([member.model.embed_tokens.weight for member in members], self.device)
        self.cos, self.sin = rotations(one, cache.cells)
        self.first_slots = torch.arange(cache.slots, device=self.device)
        self.layers = [self._layer([member.model.layers[i] for member in members]) for i in range(architecture.layers)]
        self.norm = addresses([member.model.norm.weight for member in members], self.device)
        self.head = FusedLinear(
            [[member.lm_head] for member in members], cap=architecture.final_softcap, out_dtype=torch.float32
        )
        self.shared = self.head.shared
        self._kept = members
        self.reads_prompts = True  # False: the modules do

    def read(self, token_MBT: Tensor, position_BT: Tensor, slot_B: Tensor, keep: int) -> Tensor:
        """Compute logits of the last `keep` tokens of prompts in any slots: [members, rows, keep, vocabulary]."""
        return PromptPass(self)(token_MBT, position_BT, slot_B, keep)

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
            "down": FusedLinear([[m.down_proj] for m in mlp], splits=True, early=False),
        }

    def takes(self, slots: int, tokens: int) -> bool:
        """Whether a pass of this size is fast here: not too many rows, and few tokens per sequence."""
        rows = slots * tokens * (self.members if self.shared else 1)
        fits = self._queries(tokens) <= MOST_QUERIES and tokens <= MOST_TOKENS
        return fits and rows <= MOST_ROWS

    def __call__(self, token_MBT: Tensor, position_BT: Tensor, cells: int) -> Tensor:
        """Compute logits. A sequence's real tokens come first, at positions in a row; padding, at −1, behind them."""
        a, members, slots, tokens = self.architecture, *token_MBT.shape
        count, position_BT = slots * tokens, position_BT.contiguous()  # rows of a member
        x, other_x, h = (torch.empty(members, count, a.hidden, dtype=self.dtype, device=self.device) for _ in range(3))
        sizes: dict[str, Any] = {
            "K": a.hidden,
            "BLOCK_K": triton.next_power_of_2(a.hidden),
            "WEIGHT": TYPES[self.dtype],
            **overlapping(self.device),
        }
        embed_kernel[(count, members)](
            token_MBT.contiguous(), self.embeddings, self.layers[0]["before"], x, h, count, a.embedding_scale, count,
            a.eps, a.gain_offset, **sizes,
        )  # fmt: skip

        def add(y: Tensor, post: Tensor | None, gains: Tensor, reader: FusedLinear) -> Low | None:
            """Compute x += y, and h = norm(x) for the reader, with its deltas' low-rank input where rows are few."""
            nonlocal x, other_x
            low, made, table, width = None, h, gains, 0
            if reader.deltas is not None and members * count <= FEW_ROWS:
                low = reader.deltas.room(1, members, count)
                made, table, width = low.numbers_SMBL, low.deltas.down_MLK, low.deltas.width
            residual_kernel[(members * count, max(1, width // PIECE))](
                x, y, other_x, h, gains if post is None else post, gains, made, table, members * count, count, width,
                a.eps, a.gain_offset, SPLITS=y.shape[0], POST=post is not None, PIECE=PIECE if width else 0,
                num_warps=8, **sizes,
            )  # fmt: skip
            x, other_x = other_x, x
            return low

        low: Low | None = None
        for index, layer in enumerate(self.layers):
            qkv, o, mlp, down = (layer[name] for name in ("qkv", "o", "mlp", "down"))
            found, low = self._attend(index, product(qkv, h, low), position_BT, cells, o)
            low = add(product(o, found, low), layer.get("after attention"), layer["between"], mlp)
            y = mlp_product(mlp, down, h, low)
            last = index + 1 == a.layers
            gains, reader = (self.norm, self.head) if last else (self.layers[index + 1][n] for n in ("before", "qkv"))
            low = add(y, layer.get("after mlp"), gains, reader)
        return self.head(h, low)[0].unflatten(1, (slots, tokens))

    def _queries(self, tokens: int) -> int:
        """Count the queries of one sequence that share keys and values, padded to what matrix units take."""
        return max(16, triton.next_power_of_2(tokens * self.architecture.heads // self.architecture.kv_heads))

    def _attend(
        self, index: int, qkv: Tensor, position_BT: Tensor, cells: int, reader: FusedLinear
    ) -> tuple[Tensor, Low | None]:
        """Attend from the new tokens; the reader's deltas' low-rank input comes along where cells are split."""
        a, members, (slots, tokens) = self.architecture, qkv.shape[1], position_BT.shape
        key, value = self.cache.key_RHCD[index], self.cache.value_RHCD[index]
        sequences, queries = members * slots, self._queries(tokens)
        busy = sequences * a.kv_heads * -(-cells // CELLS_PER_SPLIT) >= MULTIPROCESSORS
        splits = max(1, min(MOST_SPLITS, -(-cells // (CELLS_PER_SPLIT if busy else FEWER_CELLS))))
        found = torch.empty(members, slots * tokens, a.heads * a.head_size, dtype=self.dtype, device=self.device)
        parts = torch.empty(2, sequences * a.kv_heads * splits * queries, device=self.device)
        part_found = torch.empty(sequences * a.kv_heads * splits * queries, a.head_size, device=self.device)
        window, settings = a.windows[index], {"TOKENS": tokens, "QUERIES": queries, "CACHE": TYPES[self.dtype]}
        sizes = {"HEADS": a.heads, "KV_HEADS": a.kv_heads, "D": a.head_size, "SPLITS": splits}
        settings |= overlapping(self.device)
        placed, in_splits = tokens >= MANY_TOKENS, qkv.shape[0]
        if placed:
            qkv = PromptPass(self).place(index, qkv, position_BT, self.first_slots[:slots])
        attention_kernel[(sequences, a.kv_heads, splits)](
            qkv, key, value, position_BT, self.cos, self.sin, found, parts[0], parts[1], part_found,
            sequences * tokens, slots, members, self.cache.cells, key.stride(2), key.stride(1), key.stride(0),
            window or 0, a.scaling, a.softcap or 1.0, -(-cells // splits // 32) * 32 if splits > 1 else cells,
            BLOCK_C=32 if busy or queries > FEW_QUERIES or self.dtype.itemsize > 2 else 64,
            WINDOW=window is not None, SOFTCAP=a.softcap is not None,
            IN_SPLITS=in_splits, PLACED=placed, num_stages=3 if self.dtype.itemsize == 2 else 2,
            num_warps=8 if queries * a.head_size >= MANY_NUMBERS else 4, **sizes, **settings,
        )  # fmt: skip
        if splits == 1:
            return found, None
        rows = slots * tokens
        low = None if reader.deltas is None else reader.deltas.room(a.heads, members, rows)
        own = (found, position_BT) if low is None else (low.numbers_SMBL, low.deltas.down_MLK)
        combine_kernel[(members * rows, a.heads)](
            parts[0], parts[1], part_found, found, *own, members * rows, rows,
            PADDED_SPLITS=triton.next_power_of_2(splits), RANK=0 if low is None else low.deltas.rank, **sizes,
            **settings,
        )  # fmt: skip
        return found, low


def fuse(members: Sequence[PreTrainedModel], cache: SlotCache) -> FusedDecoder | None:
    """Make a fused decoder for these members; None where it does not know their architecture, sizes or adapters."""
    architectures = {read_architecture(member) for member in members}
    architecture = architectures.pop()
    if architectures or architecture is None or architecture.hidden % BLOCK_N or architecture.vocabulary % BLOCK_N:
        return None
    if not all(map(_is_read, members)):
        return None
    try:
        return FusedDecoder(members, cache, architecture)
    except (AttributeError, ValueError):  # a layer with deltas that cannot be batched, or are not finite
        return None


def _is_read(member: PreTrainedModel) -> bool:
    """Whether all that is put around its modules are low-rank deltas: other adapters show the weights under them."""
    return all(read_low_rank(module) is not None for module in member.modules() if hasattr(module, "base_layer"))
