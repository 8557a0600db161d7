"""Which members run as one computation, and their log-probabilities for a pass over slots.

LoRA experts and their base are always one group: the base's weights are read once for all of them. Full fine-tunes of
one architecture are stacked on a GPU, where one launch for all members is faster than one each; on a CPU they are not.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...model import ComposedForCausalLM
from ...vocabulary import Alignment
from ..slots import Pass, SlotCache
from .stacking import can_stack, shares_base, stack


class Members(Protocol):
    """What runs members over slots: a Group, or a member as it is (plain.py)."""

    members: tuple[int, ...]
    cache: Any

    def logits(
        self,
        token_BT: Tensor,
        position_BT: Tensor,
        slot_B: Tensor | int,
        cells: int,
        keep: int,
        start: int | None = None,
    ) -> list[Tensor]: ...


@dataclass
class Group:
    """Members that run as one module, over one cache."""

    members: tuple[int, ...]  # their places in the composition
    module: PreTrainedModel
    alignments: Sequence[Alignment]
    cache: SlotCache
    fused: Any = None  # a FusedDecoder for steps and for passes over a few tokens, on a GPU

    def logits(
        self,
        token_BT: Tensor,
        position_BT: Tensor,
        slot_B: Tensor | int,
        cells: int,
        keep: int,
        start: int | None = None,
    ) -> list[Tensor]:
        """Each member's logits over the shared vocabulary, of the last `keep` positions: [B, keep, V] each. `start`:
        where every row's tokens begin, if all begin there, none is padding, and the cells end with them."""
        m = len(self.members)
        if self.fused is not None and isinstance(slot_B, int) and self.fused.takes(*token_BT.shape):
            token_MBT = torch.stack([alignment.to_member(token_BT) for alignment in self.alignments])
            logits_MBTV = self.fused(token_MBT, position_BT, cells)[:, :, -keep:]
            return [alignment.to_composed(logits_MBTV[i]) for i, alignment in enumerate(self.alignments)]
        token_RT = torch.stack([alignment.to_member(token_BT) for alignment in self.alignments], 1).flatten(0, 1)
        position_RT = position_BT.repeat_interleave(m, 0)
        if isinstance(slot_B, int):
            rows: Tensor | int = slot_B * m
        else:
            rows = (slot_B[:, None] * m + torch.arange(m, device=slot_B.device)).flatten()
        self.cache.now = Pass(position_RT, rows, cells, start)
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
        members = [model.member(names[i]) for i in places]
        cache = SlotCache(slots, len(places), cells)
        alignments = [model.alignments[names[i]] for i in places]
        groups.append(Group(places, stack(members), alignments, cache, _fused(members, cache)))
    return groups


def one_member(model: ComposedForCausalLM, name: str, cache: SlotCache) -> Group:
    """A member by itself."""
    member = model.member(name)
    place = list(model.members).index(name)
    return Group((place,), stack([member]), [model.alignments[name]], cache, _fused([member], cache))


def _fused(members: Sequence[PreTrainedModel], cache: SlotCache) -> Any:
    """Passes over few tokens as few kernels, where there are a GPU, Triton and an architecture that they know."""
    if members[0].device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    from ..cuda.fused.decoder import fuse

    return fuse(members, cache)


def member_logits(
    groups: Sequence[Members],
    token_BT: Tensor,
    position_BT: Tensor,
    slot_B: Tensor | int,
    cells: int,
    keep: int,
    start: int | None = None,
) -> list[Tensor]:
    """Logits of all members, in the composition's order: [B, keep, V] each."""
    found: dict[int, Tensor] = {}
    for group in groups:
        logits = group.logits(token_BT, position_BT, slot_B, cells, keep, start)
        found |= dict(zip(group.members, logits, strict=True))
    return [found[i] for i in range(len(found))]
