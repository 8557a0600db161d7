"""Members as they are, each sequence by itself with a cache of its own, as the modules of groups.

Computes what the reference model computes, for compositions that the fast path cannot take: slow, one sequence after
another. A beginning that two prompts share is fed twice: not every cache can be cropped.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.utils import ModelOutput

from ..model import ComposedForCausalLM
from ..vocabulary import Alignment
from .members.attention import SlotPass
from .members.groups import Group


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


class PlainMember:
    """One member, which looks like the module of a Group."""

    def __init__(self, model: ComposedForCausalLM, name: str):
        self.model, self.name = model, name
        self.caches = SlotCaches(model.member(name).config)

    def __call__(self, input_ids: Tensor, slot_pass: SlotPass, logits_to_keep: int, **_: Any) -> ModelOutput:
        """Feed every row by itself; logits are zero where there is padding."""
        by_row: dict[int, Tensor] = {}
        for row, slot in enumerate(slot_pass.row_R.tolist()):
            real_T = slot_pass.position_RT[row] >= 0
            if real_T.any():
                token_T, position_T = input_ids[row, real_T], slot_pass.position_RT[row, real_T]
                by_row[row] = self._continue(slot, token_T, position_T, logits_to_keep)
        like_TV = next(iter(by_row.values()))
        logits_BTV = like_TV.new_zeros(len(input_ids), logits_to_keep, like_TV.shape[-1])
        for row, logits_TV in by_row.items():
            logits_BTV[row, logits_to_keep - len(logits_TV) :] = logits_TV
        return ModelOutput(logits=logits_BTV)

    def _continue(self, slot: int, token_T: Tensor, position_T: Tensor, keep: int) -> Tensor:
        """Feed one sequence's next tokens: [keep or fewer, V]."""
        cache = self.caches.at(slot, int(position_T[0]))
        mask = {"attention_mask": token_T.new_ones(1, int(position_T[-1]) + 1)}  # tokens that read as padding are none
        return self.model.member_logits(self.name, token_T[None], cache, keep, mask)[0]


def plain_groups(model: ComposedForCausalLM) -> list[Group]:
    """Make a group of every member; the model's own `member_logits` translates token ids."""
    modules, same = [PlainMember(model, name) for name in model.members], Alignment(None, model.config.vocab_size)
    return [Group((place,), module, [same], module.caches) for place, module in enumerate(modules)]
