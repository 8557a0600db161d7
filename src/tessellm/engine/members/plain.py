"""Members as they are, each sequence by itself with a cache of its own, as the modules of groups.

Computes what the reference model computes, for compositions that the fast path cannot take: slow, one sequence after
another. A beginning that two prompts share is read twice: not every cache can be cropped.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.utils import ModelOutput

from ...model import ComposedForCausalLM
from ...vocabulary import Alignment
from .attention import BranchPass
from .groups import Group
from .segments import Segments


class SlotCaches:
    """One member's caches, by slot."""

    def __init__(self, config: Any):
        self.config = config
        self.by_slot: dict[int, Cache] = {}

    def at(self, slot: int, position: int) -> Cache:
        """Return the cache of the sequence in a slot; position 0 begins a new one."""
        if position == 0:
            self.by_slot[slot] = DynamicCache(config=self.config)
        return self.by_slot[slot]

    def row(self, slot: int, member: int) -> int:
        return slot

    def clear(self, slot: int, first: int = 0) -> None:
        """Keep what is there: nobody else reads it."""

    def is_finite(self, slot: int, member: int, position: int) -> bool:
        return True  # nobody else reads it


class PlainMember:
    """One member, which looks like the module of a Group."""

    def __init__(self, model: ComposedForCausalLM, name: str):
        self.model, self.name, self.device = model, name, model.device
        self.caches = SlotCaches(model.member(name).config)

    def __call__(self, input_ids: Tensor, rows_pass: BranchPass, logits_to_keep: Tensor, **_: Any) -> ModelOutput:
        """Read every branch by itself."""
        logits = []
        for slot, begin, end, start in rows_pass.spans:
            keep = int(((logits_to_keep >= begin) & (logits_to_keep < end)).sum())
            cache = self.caches.at(slot, start)
            mask = {
                "attention_mask": input_ids.new_ones(1, start + end - begin)
            }  # tokens that read as padding are none
            own_1TV = self.model.member_logits(self.name, input_ids[:, begin:end], cache, max(1, keep), mask)
            logits.append(own_1TV[:, own_1TV.shape[1] - keep :])
        return ModelOutput(logits=torch.cat(logits, 1))


def plain_groups(model: ComposedForCausalLM) -> list[Group]:
    """Make a group of every member; the model's own `member_logits` translates token ids."""
    modules, same = [PlainMember(model, name) for name in model.members], Alignment(None, model.config.vocab_size)
    return [Group((place,), module, [same], module.caches, Segments()) for place, module in enumerate(modules)]
