"""Members as they are, each sequence by itself with a cache of its own, behind the interface of Group.

What the reference model computes, for compositions that the fast path cannot take: slow, one sequence after another,
and with all else that an engine has. A beginning that two prompts share is fed twice: not every cache can be cut.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import Cache, DynamicCache

from ..model import ComposedForCausalLM


class SlotCaches:
    """One member's caches, by slot."""

    def __init__(self, config: Any):
        self.config = config
        self.of_slot: dict[int, Cache] = {}

    def at(self, slot: int, position: int) -> Cache:
        """The cache of the sequence in that slot, which has so many tokens; a new one begins anew."""
        if position == 0:
            self.of_slot[slot] = DynamicCache(config=self.config)
        return self.of_slot[slot]

    def copy_slot(self, source: int, target: int, cells: int) -> None:
        """A sequence that moves takes its cache along."""
        self.of_slot[target] = self.of_slot.pop(source)


class PlainGroup:
    """One member, in that place of the composition."""

    def __init__(self, model: ComposedForCausalLM, place: int):
        self.model = model
        self.members: tuple[int, ...] = (place,)
        self.name = model.config.member_names[place]
        self.cache: Any = SlotCaches(model.member(self.name).config)

    def logits(
        self,
        token_BT: Tensor,
        position_BT: Tensor,
        slot_B: Tensor | int,
        cells: int,
        keep: int,
        start: int | None = None,
    ) -> list[Tensor]:
        """As of a Group: of the last `keep` positions, zeros where there is padding."""
        slots = range(slot_B) if isinstance(slot_B, int) else slot_B.tolist()
        found: dict[int, Tensor] = {}
        for row, slot in enumerate(slots):
            real_T = position_BT[row] >= 0
            if real_T.any():
                found[row] = self._row(slot, token_BT[row, real_T], position_BT[row, real_T], keep)
        like_TV = next(iter(found.values()))
        logits_BTV = like_TV.new_zeros(len(token_BT), keep, like_TV.shape[-1])
        for row, logits_TV in found.items():
            logits_BTV[row, keep - len(logits_TV) :] = logits_TV
        return [logits_BTV]

    def _row(self, slot: int, token_T: Tensor, position_T: Tensor, keep: int) -> Tensor:
        """One sequence goes on: [keep or fewer, V]."""
        cache = self.cache.at(slot, int(position_T[0]))
        mask = {"attention_mask": token_T.new_ones(1, int(position_T[-1]) + 1)}  # tokens that read as padding are none
        return self.model.member_logits(self.name, token_T[None], cache, keep, mask)[0]


def plain_groups(model: ComposedForCausalLM) -> list[PlainGroup]:
    return [PlainGroup(model, place) for place in range(len(model.members))]
