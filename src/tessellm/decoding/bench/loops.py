"""The loops that people write to decode several models at once: what the engine is compared with.

    notebook      every member's forward with a cache of its own; float32 log-probabilities to the CPU, Eq. 2 there
    on device     the same, but nothing leaves the device before the token does
    padded        a batch, padded on the left, that runs until its longest row is done

Each yields nothing but its time: they decode greedily by Eq. 2, without stopping.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from ...model import ComposedForCausalLM
from ...rules import product


class Loop:
    """Members with a cache each, fed the same tokens."""

    def __init__(self, model: ComposedForCausalLM, rows: Sequence[Sequence[int]], to_cpu: bool):
        self.model, self.to_cpu, self.device = model, to_cpu, model.device
        longest = max(map(len, rows))
        self.mask_BT = torch.zeros(len(rows), longest, dtype=torch.long, device=self.device)
        self.token_BT = torch.zeros_like(self.mask_BT)
        for b, row in enumerate(rows):
            self.token_BT[b, longest - len(row) :] = torch.tensor(row, device=self.device)
            self.mask_BT[b, longest - len(row) :] = 1
        self.padded = bool((self.mask_BT == 0).any())
        self.caches = [DynamicCache(config=model.member(name).config) for name in model.members]

    @torch.inference_mode()
    def step(self) -> list[int]:
        """One token more for every row."""
        both = zip(self.model.members, self.caches, strict=True)
        logp_MBV = torch.stack([self._logp(name, cache) for name, cache in both])
        token_B = product(logp_MBV).argmax(-1)
        self.token_BT = token_B[:, None].to(self.device)
        self.mask_BT = torch.nn.functional.pad(self.mask_BT, (0, 1), value=1)
        return token_B.tolist()

    def _logp(self, name: str, cache: DynamicCache) -> Tensor:
        given: dict[str, Any] = {}
        if self.padded:
            position_BT = (self.mask_BT.cumsum(1) - 1).clamp_min(0)
            given = {"attention_mask": self.mask_BT, "position_ids": position_BT[:, -self.token_BT.shape[1] :]}
        alignment = self.model.alignments[name]
        own_BT = alignment.to_member(self.token_BT)
        output = self.model.member(name)(own_BT, past_key_values=cache, logits_to_keep=1, **given)
        logp_BV = alignment.to_composed(output.logits[:, -1]).float().log_softmax(-1)
        return logp_BV.cpu() if self.to_cpu else logp_BV


def padded_seconds(
    model: ComposedForCausalLM, rows: Sequence[Sequence[int]], new: Sequence[int], batch: int, to_cpu: bool = False
) -> float:
    """How long rows take that each want so many new tokens, a padded batch after the other."""
    start = time.perf_counter()
    for first in range(0, len(rows), batch):
        loop = Loop(model, rows[first : first + batch], to_cpu)
        for _ in range(max(new[first : first + batch])):
            loop.step()
    return time.perf_counter() - start
