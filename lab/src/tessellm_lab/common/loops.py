"""The loops that people write to decode several models at once: what the engine is compared with.

    notebook      the paper's: every member's forward with a cache of its own, float32 logits to the CPU; there
                  log-probabilities, the base's not below −10⁴, Eq. 2, a softmax, and the best token
    on device     Eq. 2 on the device: nothing leaves it before the token does
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

from tessellm.model import ComposedForCausalLM
from tessellm.rules import LOG_FLOOR, product


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
        logits_M = [self._logits(name, cache) for name, cache in both]
        combined = _as_the_notebook if self.to_cpu else _on_the_device
        token_B = (combined(logits_M) if len(logits_M) > 1 else logits_M[0]).argmax(-1)  # one member needs no rule
        self.token_BT = token_B[:, None].to(self.device)
        self.mask_BT = torch.nn.functional.pad(self.mask_BT, (0, 1), value=1)
        return token_B.tolist()

    def _logits(self, name: str, cache: DynamicCache) -> Tensor:
        given: dict[str, Any] = {}
        if self.padded:
            position_BT = (self.mask_BT.cumsum(1) - 1).clamp_min(0)
            given = {"attention_mask": self.mask_BT, "position_ids": position_BT[:, -self.token_BT.shape[1] :]}
        alignment = self.model.alignments[name]
        own_BT = alignment.to_member(self.token_BT)
        output = self.model.member(name)(own_BT, past_key_values=cache, logits_to_keep=1, **given)
        logits_BV = alignment.to_composed(output.logits[:, -1]).float()
        return logits_BV.cpu() if self.to_cpu else logits_BV


def loop_steps(model: ComposedForCausalLM, rows: Sequence[Sequence[int]], new: int, to_cpu: bool) -> float:
    """Seconds a step of a loop after its first token."""
    loop = Loop(model, rows, to_cpu)
    loop.step()
    start = time.perf_counter()
    for _ in range(new - 1):
        loop.step()
    return (time.perf_counter() - start) / (new - 1)


def _as_the_notebook(logits_M: Sequence[Tensor]) -> Tensor:
    base_BV, *experts = (logits_BV.log_softmax(-1) for logits_BV in logits_M)
    total_BV = torch.stack(experts).sum(0) - (len(experts) - 1) * base_BV.clamp_min(LOG_FLOOR)
    return total_BV.softmax(-1)


def _on_the_device(logits_M: Sequence[Tensor]) -> Tensor:
    return product(torch.stack([logits_BV.log_softmax(-1) for logits_BV in logits_M]))
