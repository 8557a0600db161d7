"""The members' hidden states, the base's energies and the tokens read, kept in the engine's own paged cache.

The state of `mixture` can be rebuilt from the answer so far, and its prior from the prompt's energies. Both are kept
here like keys and values: in the same blocks, shared by prefix caching, dropped by preemption, whatever the chunks of a
prompt. So wherever the engine can attend to a position, the rule can look back at it. What it costs is in docs/vllm.md.

Shapes: T tokens, N texts, H hidden sizes of all members, K experts of the router, S slots.

vLLM hands a layer's batch to its metadata builder at every step: which request reads which positions, and where in the
cache they lie. The builder leaves that here, for `state.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .versions import (
    AttentionLayerBase,
    AttentionMetadataBuilder,
    CacheOnlyAttentionBackend,
    CacheOnlyAttentionImpl,
    HiddenStateCacheSpec,
    get_forward_context,
)

LAYER = "tessellm_memory.0"  # vLLM wants one number in a layer's name


@dataclass(frozen=True)
class Step:
    """One batch: its requests' tokens stand one request after the other."""

    start_B: Tensor  # where each request's tokens start, and the end
    length_B: Tensor  # how many positions of each request are computed after this step
    block_BJ: Tensor  # the blocks that hold each request's positions
    slot_T: Tensor  # where each token of the batch goes


class Memory(nn.Module, AttentionLayerBase):
    """A layer that attends to nothing: it keeps each position's hidden states, energies and token. Energies are
    float32: their bits stand behind the hidden states."""

    def __init__(self, vllm_config: Any, hidden: int, experts: int = 0):
        super().__init__()
        self.dtype = vllm_config.model_config.dtype
        self.hidden, self.experts = hidden, experts
        self.size = size = hidden + experts * (4 // self.dtype.itemsize)
        self.block_size = vllm_config.cache_config.block_size
        self.impl = CacheOnlyAttentionImpl(1, size, "auto", self.dtype)
        self._cache = torch.tensor([])
        self.token_S = torch.tensor([])  # the token at each slot
        self.step: Step | None = None
        layers = vllm_config.compilation_config.static_forward_context
        if LAYER in layers:
            raise ValueError(f"Duplicate layer name: {LAYER}")
        layers[LAYER] = self

    def get_attn_backend(self) -> type:
        return MemoryBackend

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        block_size = vllm_config.cache_config.block_size
        return HiddenStateCacheSpec(block_size=block_size, num_kv_heads=1, head_size=self.size, dtype=self.dtype)

    @property
    def kv_cache(self) -> Tensor:
        """The cache, [blocks, 1, block size, H]."""
        return self._cache

    @kv_cache.setter
    def kv_cache(self, kv_cache: Tensor) -> None:
        if kv_cache.numel():
            self.bind_kv_cache(kv_cache.transpose(1, 2))  # vLLM 0.26 assigns it, [blocks, block size, 1, H]
        else:
            self._cache = kv_cache  # the engine ends

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        self._cache = kv_cache
        slots = kv_cache.shape[0] * kv_cache.shape[2]
        self.token_S = torch.zeros(slots, dtype=torch.long, device=kv_cache.device)

    def forward(self, hidden_TH: Tensor, tokens_T: Tensor, energy_TK: Tensor | None = None) -> None:
        """Keep a batch. Padding goes to block 0, which belongs to no request."""
        slots = get_forward_context().slot_mapping
        slot_T = slots.get(LAYER) if isinstance(slots, dict) else None
        if slot_T is None or not self.kv_cache.numel():
            return  # a trial run, before there is a cache
        slot_T = slot_T[: len(hidden_TH)].clamp_min(0)
        rows = len(slot_T)
        size = self.kv_cache.shape[2]
        kept = hidden_TH[:rows].to(self.dtype)
        if energy_TK is not None and energy_TK.numel():
            bits = energy_TK[:rows].to(kept.device, torch.float32).contiguous().view(self.dtype)
            kept = torch.cat([kept, bits], 1)
        self.kv_cache[slot_T // size, 0, slot_T % size] = kept
        self.token_S[slot_T] = tokens_T[:rows].long()

    def slots(self, step: Step, rows_N: Tensor, position_NT: Tensor) -> Tensor:
        """Find the cache slots of some requests' positions: [N, T]."""
        size = self.kv_cache.shape[2]
        block_NT = step.block_BJ[rows_N[:, None], position_NT // size].long()
        return block_NT * size + position_NT % size

    def recall(self, slot_T: Tensor) -> Tensor:
        """Read the hidden states at those places: [T, H]."""
        size = self.kv_cache.shape[2]
        return self.kv_cache[slot_T // size, 0, slot_T % size, : self.hidden]

    def recall_energies(self, slot_T: Tensor) -> Tensor:
        """Read the energies at those places, on the CPU: [T, K]."""
        size = self.kv_cache.shape[2]
        bits = self.kv_cache[slot_T // size, 0, slot_T % size, self.hidden :].cpu()
        return bits.clone(memory_format=torch.contiguous_format).view(torch.float32)


class MemoryBuilder(AttentionMetadataBuilder):
    """Leaves every batch with the layer that it is built for."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.memory = vllm_config.compilation_config.static_forward_context[LAYER]

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Step:
        batch = common_attn_metadata
        step = Step(batch.query_start_loc, batch.seq_lens, batch.block_table_tensor, batch.slot_mapping)
        self.memory.step = step
        return step


class MemoryBackend(CacheOnlyAttentionBackend):
    @staticmethod
    def get_name() -> str:
        return "TESSELLM_MEMORY"

    @staticmethod
    def get_builder_cls() -> type:
        return MemoryBuilder
