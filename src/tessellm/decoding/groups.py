"""Which members run as one computation, and their log-probabilities for a pass over slots.

LoRA experts and their base are always one group: the base's weights are read once for all of them. Full fine-tunes of
one architecture are stacked on a GPU, where one launch for all members is faster than one each; on a CPU they are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..model import ComposedForCausalLM
from ..rules import working_dtype
from ..speakers import Alignment
from .slots import Pass, SlotCache
from .stacking import can_stack, shares_base, stack


@dataclass
class Group:
    """Members that run as one module, over one cache."""

    members: tuple[int, ...]  # their places in the composition
    module: PreTrainedModel
    alignments: Sequence[Alignment]
    cache: SlotCache

    def logits(
        self, token_BT: Tensor, position_BT: Tensor, slot_B: Tensor | int, cells: int, keep: int
    ) -> list[Tensor]:
        """Each member's logits over the shared vocabulary, of the last `keep` positions: [B, keep, V] each."""
        m = len(self.members)
        token_RT = torch.stack([alignment.to_member(token_BT) for alignment in self.alignments], 1).flatten(0, 1)
        position_RT = position_BT.repeat_interleave(m, 0)
        if isinstance(slot_B, int):
            rows: Tensor | int = slot_B * m
        else:
            rows = (slot_B[:, None] * m + torch.arange(m, device=slot_B.device)).flatten()
        self.cache.now = Pass(position_RT, rows, cells)
        call: Any = self.module
        output = call(
            input_ids=token_RT,
            position_ids=position_RT.clamp_min(0),
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=keep,
            slot_pass=self.cache.now,
        )
        logits_BMTV = output.logits.unflatten(0, (-1, m))
        return [alignment.to_composed(logits_BMTV[:, i]) for i, alignment in enumerate(self.alignments)]


def plan(model: ComposedForCausalLM, stacked: bool | None = None) -> list[tuple[int, ...]]:
    """Which members run together. `stacked` says whether full fine-tunes of one architecture do; None: if on a GPU."""
    members = [model.member(name) for name in model.members]
    adapters = [i for i, member in enumerate(members) if i and shares_base(member, members[0])]
    together = (0, *adapters)
    rest = [(i,) for i in range(len(members)) if i not in together]
    if stacked is None:
        stacked = model.device.type == "cuda"
    if stacked and rest:
        alike = [i for (i,) in rest if can_stack([members[i], members[0]])]
        if not adapters:
            together = (0, *alike)
            rest = [(i,) for (i,) in rest if i not in alike]
    return [together, *rest]


def make_groups(model: ComposedForCausalLM, slots: int, cells: int, stacked: bool | None = None) -> list[Group]:
    """The groups of a composition, with empty caches."""
    names = list(model.members)
    groups = []
    for places in plan(model, stacked):
        module = stack([model.member(names[i]) for i in places])
        alignments = [model.alignments[names[i]] for i in places]
        groups.append(Group(places, module, alignments, SlotCache(slots, len(places), cells)))
    return groups


def member_logprobs(
    groups: Sequence[Group], token_BT: Tensor, position_BT: Tensor, slot_B: Tensor | int, cells: int, keep: int
) -> Tensor:
    """Log-probabilities of all members, in the composition's order: [M, B, keep, V]."""
    found: dict[int, Tensor] = {}
    for group in groups:
        logits = group.logits(token_BT, position_BT, slot_B, cells, keep)
        found |= dict(zip(group.members, logits, strict=True))
    ordered = [found[i] for i in range(len(found))]
    return torch.stack([row.to(working_dtype(row)).log_softmax(-1) for row in ordered])
