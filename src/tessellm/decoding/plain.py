"""Members as they are, each sequence by itself with a cache of its own, behind the interface of Group.

Computes what the reference model computes, for compositions that the fast path cannot take: slow, one sequence after
another. A beginning that two prompts share is fed twice: not every cache can be cropped.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import Cache, DynamicCache

from ..model import ComposedForCausalLM
from .slots import TokenBatch


class SlotCaches:
    """One member's caches, by slot."""

    def __init__(self, config: Any):
        self.config = config
        self.by_slot: dict[int, Cache] = {}

    def at(self, slot: int, position: int) -> Cache:
        """Take the cache of the sequence in a slot; position 0 begins a new one."""
        if position == 0:
            self.by_slot[slot] = DynamicCache(config=self.config)
        return self.by_slot[slot]

    def copy_slot(self, source: int, target: int, cells: int) -> None:
        """Move a sequence's cache along with it."""
        self.by_slot[target] = self.by_slot.pop(source)

    def clear(self, slot: int, first: int = 0) -> None:
        self.by_slot.pop(slot, None)


class PlainGroup:
    """One member, in that place of the composition."""

    def __init__(self, model: ComposedForCausalLM, place: int):
        self.model = model
        self.members: tuple[int, ...] = (place,)
        self.name = model.config.member_names[place]
        self.cache: Any = SlotCaches(model.member(self.name).config)

    def logits(self, batch: TokenBatch) -> list[Tensor]:
        """As a Group does, with zeros where there is padding."""
        by_row: dict[int, Tensor] = {}
        for row, slot in enumerate(batch.slot_B.tolist()):
            real_T = batch.position_BT[row] >= 0
            if real_T.any():
                token_T, position_T = batch.token_BT[row, real_T], batch.position_BT[row, real_T]
                by_row[row] = self._continue(slot, token_T, position_T, batch.keep)
        like_TV = next(iter(by_row.values()))
        logits_BTV = like_TV.new_zeros(len(batch.slot_B), batch.keep, like_TV.shape[-1])
        for row, logits_TV in by_row.items():
            logits_BTV[row, batch.keep - len(logits_TV) :] = logits_TV
        return [logits_BTV]

    def _continue(self, slot: int, token_T: Tensor, position_T: Tensor, keep: int) -> Tensor:
        """Feed one sequence's next tokens: [keep or fewer, V]."""
        cache = self.cache.at(slot, int(position_T[0]))
        mask = {"attention_mask": token_T.new_ones(1, int(position_T[-1]) + 1)}  # tokens that read as padding are none
        return self.model.member_logits(self.name, token_T[None], cache, keep, mask)[0]


def plain_groups(model: ComposedForCausalLM) -> list[PlainGroup]:
    return [PlainGroup(model, place) for place in range(len(model.members))]
