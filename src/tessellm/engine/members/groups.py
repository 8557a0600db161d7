"""Which members run as one computation.

LoRA experts and their base are always one group: the base's weights are read once for all of them. Full fine-tunes of
one architecture are stacked on a GPU, where one launch for all members is faster than one each; on a CPU they are not.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers import PreTrainedModel

from ...model import ComposedForCausalLM
from ...vocabulary import Alignment
from ..cpu.decoder import cpu_decoder
from .kv_cache import SlotCache
from .segments import Segments
from .stacking import can_stack, shares_base, stack


@dataclass
class Group:
    """Members that run as one module, over one cache."""

    members: tuple[int, ...]  # their places in the composition
    module: Any  # of Hugging Face, or one that looks so (plain.py)
    alignments: Sequence[Alignment]
    cache: Any  # a SlotCache, or what the module keeps instead
    segments: Segments
    decoder: Any = None  # a CpuDecoder for steps of one token per branch, on a CPU
    tapped: bool = False  # a router listens to the module, so all forwards must go through it
    fused: Any = None  # a FusedDecoder for steps and for passes over a few tokens, on a GPU

    @property
    def reads_fused(self) -> bool:
        """Whether prompts are read by few kernels, too, from the second pass on: the first, by the modules, makes the
        cache."""
        return self.fused is not None and self.fused.reads_prompts

    @cached_property
    def same_ids(self) -> bool:
        """Whether every member has the composition's token ids."""
        return all(each.member_id_V is None and each.silent_U is None for each in self.alignments)


def stacks_fine_tunes(model: ComposedForCausalLM) -> bool:
    """Whether full fine-tunes of one architecture run faster as one computation."""
    return model.device.type == "cuda"


def plan_groups(model: ComposedForCausalLM, stacked: bool) -> list[tuple[int, ...]]:
    """Sort the members' places into groups. `stacked`: full fine-tunes of one architecture are one group."""
    members = [model.member(name) for name in model.members]
    together = [0, *(i for i, member in enumerate(members) if i and shares_base(member, members[0]))]
    if stacked and len(together) == 1:
        together += [i for i, member in enumerate(members) if i and can_stack([member, members[0]])]
    return [tuple(together), *((i,) for i in range(len(members)) if i not in together)]


def make_groups(model: ComposedForCausalLM, slots: int, cells: int, stacked: bool) -> list[Group]:
    """Make the groups of a composition, with empty caches."""
    return [make_group(model, places, SlotCache(slots, len(places), cells)) for places in plan_groups(model, stacked)]


def make_group(model: ComposedForCausalLM, places: tuple[int, ...], cache: SlotCache) -> Group:
    """Make one group of the members in these places of the composition."""
    names = [list(model.members)[place] for place in places]
    members = [model.member(name) for name in names]
    alignments, segments = [model.alignments[name] for name in names], Segments()
    module = stack(members, segments)
    decoder, fused = cpu_decoder(module, cache), _fused(members, cache)
    return Group(places, module, alignments, cache, segments, decoder, fused=fused)


def _fused(members: Sequence[PreTrainedModel], cache: SlotCache) -> Any:
    """Make a decoder of few kernels, where there are a GPU, Triton and an architecture that it knows."""
    if members[0].device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    from ..cuda.fused.decoder import fuse

    return fuse(members, cache)
