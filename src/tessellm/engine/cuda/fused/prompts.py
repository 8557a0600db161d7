"""PromptPass: read prompts, or pieces of them, with the fused decoder's weights and caches, in few launches.

Norms, rotations, attention and activations are kernels of ours, however many tokens there are; products are ours or the
library's (products.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor

from .kernels import embed_kernel, residual_kernel
from .layers import MULTIPROCESSORS, TYPES
from .library import wide_logits
from .overlap import overlapping
from .products import mlp_product, product
from .prompt_kernels import place_kernel, prompt_attention_kernel

if TYPE_CHECKING:
    from .decoder import FusedDecoder

OWN_LOGIT_ROWS = 512  # rows per weight up to which the output layer is ours; more would be too many for its addresses
FEW_CELLS = 32  # cells that a small block of queries reads at once


class PromptPass:
    """Token ids and positions of any slots to logits of the last tokens."""

    def __init__(self, decoder: FusedDecoder):
        self.decoder = decoder

    def __call__(self, token_MBT: Tensor, position_BT: Tensor, slot_B: Tensor, keep: int) -> Tensor:
        """Compute logits of each row's last `keep` tokens: [members, rows, keep, vocabulary] in float32."""
        fused, a = self.decoder, self.decoder.architecture
        members, rows, tokens = token_MBT.shape
        count, position_BT, slot_B = rows * tokens, position_BT.contiguous(), slot_B.contiguous()
        x, h = (torch.empty(members, count, a.hidden, dtype=fused.dtype, device=fused.device) for _ in range(2))
        embed_kernel[(count, members)](
            token_MBT.contiguous(), fused.embeddings, fused.layers[0]["before"], x, h, count, a.embedding_scale, count,
            a.eps, a.gain_offset, **self._sizes(),
        )  # fmt: skip
        for index, layer in enumerate(fused.layers):
            last = index + 1 == a.layers
            found = self._attend(index, product(layer["qkv"], h), position_BT, slot_B)
            if last and keep < tokens:  # from here on a token is by itself
                x, found = (
                    each.unflatten(1, (rows, tokens))[:, :, -keep:].flatten(1, 2).contiguous() for each in (x, found)
                )
                h = torch.empty_like(x)
            self._add(x, product(layer["o"], found), layer.get("after attention"), layer["between"], h)
            gains = fused.norm if last else fused.layers[index + 1]["before"]
            self._add(x, mlp_product(layer["mlp"], layer["down"], h), layer.get("after mlp"), gains, h)
        plain = fused.head.deltas is None and fused.head.biases[0][0] is None
        by_library = plain and h.shape[1] * (members if fused.shared else 1) > OWN_LOGIT_ROWS
        return (wide_logits(fused.head, h) if by_library else fused.head(h)[0]).unflatten(1, (rows, keep))

    def _sizes(self) -> dict[str, Any]:
        hidden = self.decoder.architecture.hidden
        own = {"K": hidden, "BLOCK_K": triton.next_power_of_2(hidden), "WEIGHT": TYPES[self.decoder.dtype]}
        return own | overlapping(self.decoder.device)

    def _add(self, x: Tensor, y: Tensor, post: Tensor | None, gains: Tensor, h: Tensor) -> None:
        """Compute x += y, and h = norm(x) for what reads it next."""
        a, (members, rows, _) = self.decoder.architecture, x.shape
        residual_kernel[(members * rows, 1)](
            x, y, x, h, gains if post is None else post, gains, h, gains, members * rows, rows, 0, a.eps, a.gain_offset,
            SPLITS=y.shape[0], POST=post is not None, PIECE=0, num_warps=8, **self._sizes(),
        )  # fmt: skip

    def place(self, index: int, qkv: Tensor, position_BT: Tensor, slot_B: Tensor) -> Tensor:
        """Put a layer's keys and values into their cells; the queries, rotated."""
        fused, a = self.decoder, self.decoder.architecture
        key, value = fused.cache.key_RHCD[index], fused.cache.value_RHCD[index]
        members, count, tokens = qkv.shape[1], qkv.shape[2], position_BT.shape[1]
        turned = torch.empty(members, count, a.heads * a.head_size, dtype=fused.dtype, device=fused.device)
        place_kernel[(members * count,)](
            qkv, key, value, slot_B, position_BT, fused.cos, fused.sin, turned, members * count, count, tokens, members,
            fused.cache.cells, key.stride(2), key.stride(1), key.stride(0),
            ALL_HEADS=triton.next_power_of_2(a.heads + 2 * a.kv_heads), IN_SPLITS=qkv.shape[0], **self._heads(),
        )  # fmt: skip
        return turned

    def _heads(self) -> dict[str, Any]:
        fused, a = self.decoder, self.decoder.architecture
        sizes: dict[str, Any] = {"HEADS": a.heads, "KV_HEADS": a.kv_heads, "D": a.head_size}
        return sizes | {"CACHE": TYPES[fused.dtype], **overlapping(fused.device)}

    def _attend(self, index: int, qkv: Tensor, position_BT: Tensor, slot_B: Tensor) -> Tensor:
        fused, a = self.decoder, self.decoder.architecture
        key, value = fused.cache.key_RHCD[index], fused.cache.value_RHCD[index]
        members, (rows, tokens) = qkv.shape[1], position_BT.shape
        turned = self.place(index, qkv, position_BT, slot_B)
        found = torch.empty_like(turned)
        queries, window = tokens * (a.heads // a.kv_heads), a.windows[index]
        blocks = self._blocks(queries, members * rows * a.kv_heads)
        prompt_attention_kernel[(-(-queries // blocks["BLOCK_Q"]), members * rows, a.kv_heads)](
            turned, key, value, slot_B, position_BT, found, tokens, rows, members, key.stride(2), key.stride(1),
            key.stride(0), window or 0, a.scaling, a.softcap or 1.0, WINDOW=window is not None,
            SOFTCAP=a.softcap is not None, **blocks, **self._heads(),
        )  # fmt: skip
        return found

    def _blocks(self, queries: int, others: int) -> dict[str, int]:
        """Choose blocks of queries and cells: large ones where they are enough for all multiprocessors."""
        if self.decoder.dtype.itemsize > 2:
            return {"BLOCK_Q": 32, "BLOCK_C": 16, "num_warps": 4, "num_stages": 2}
        large = -(-queries // 128) * others >= MULTIPROCESSORS
        return {"BLOCK_Q": 128 if large else 64, "BLOCK_C": 64 if large else FEW_CELLS, "num_warps": 8 if large else 4,
                "num_stages": 2}  # fmt: skip
