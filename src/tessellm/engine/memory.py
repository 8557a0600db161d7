"""How many slots of how many tokens to make: what their caches take, and what there is memory for.

Slots are made whole when an engine starts, so their size is decided before. Knows configs and bytes, not weights.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import EngineError
from ..model import ComposedForCausalLM

CONTEXT = 4096  # tokens per slot, where neither the user nor the members say
SLOTS = 16  # at most, unless the user says
SHARE = 0.25  # of the free memory: what caches take at most, unless the user says
SHORTEST = 512  # tokens per slot, below which no context is made to fit
MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class SlotBytes:
    """What slots take: per token the keys and values of all members, per slot rows of log-probabilities beside them."""

    token: int
    slot: int

    def of(self, slots: int, context: int) -> int:
        return slots * (self.token * (context + 1) + self.slot)  # a cell more, for padding


@dataclass(frozen=True)
class SlotPlan:
    """A number of slots, tokens per slot, and the memory that they take."""

    slots: int
    context: int
    bytes: int
    free: int

    def __str__(self) -> str:
        taken, free = (number / (1 << 30) for number in (self.bytes, self.free))
        return f"{self.slots} slots of {self.context:,} tokens: {taken:.2f} GiB of caches, of {free:.1f} GiB free"


def fit(
    each: SlotBytes, free: int, limit: int | None, slots: int | None = None, context: int | None = None
) -> SlotPlan:
    """Plan as many slots as fit into a share of the free memory, each as long as members allow; or what was asked."""
    longest = min(number for number in (context, limit, CONTEXT if context is None else None) if number)
    budget = int(free * SHARE)
    if slots is None:
        slots = max(1, min(SLOTS, budget // each.of(1, longest)))
    if context is None:
        most = (budget // slots - each.slot) // max(1, each.token) - 1
        longest = min(longest, max(SHORTEST, most))
    return SlotPlan(slots, longest, each.of(slots, longest), free)


def plan_slots(model: ComposedForCausalLM, slots: int | None = None, context: int | None = None) -> SlotPlan:
    """Plan slots for a loaded composition on its device; refuse more than all of its free memory."""
    plan = fit(slot_bytes(model), free_bytes(model.device), model.config.max_position_embeddings, slots, context)
    if plan.bytes > plan.free:
        raise EngineError(f"{plan} on {model.device}. Use fewer slots or a smaller context (--slots, --context)")
    return plan


def slot_bytes(model: ComposedForCausalLM) -> SlotBytes:
    members = [model.member(name) for name in model.members]
    token = sum(cell_values(member.config) * member.dtype.itemsize for member in members)
    return SlotBytes(token, row_bytes(len(members), model.config.vocab_size, model.rule.stateful))


def cell_values(config: Any) -> int:
    """Count the numbers that a member keeps in its cache per token."""
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_attention_heads", None)
    if not heads:
        return 0  # recurrent: what it keeps does not grow with the text
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    return int(2 * text.num_hidden_layers * kv_heads * head_dim)


def row_bytes(members: int, vocab_size: int, remembers: bool) -> int:
    """Count a slot's bytes beside its cache: log-probabilities in float32, and the last row where a rule keeps it."""
    return members * vocab_size * 4 * (2 if remembers else 1)


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(min(_available(), _left_to_group()))


def _available() -> int:
    """Return the memory that the system gives without swapping; all of it where it does not tell."""
    if MEMINFO.exists():
        lines = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines() if ":" in line)
        if "MemAvailable" in lines:
            return int(lines["MemAvailable"].split()[0]) * 1024
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 8 << 30


def _left_to_group() -> float:
    """Return the memory that a container leaves to its processes; infinite where it sets no limit."""
    try:
        most, used = (CGROUP / name for name in ("memory.max", "memory.current"))
        return int(most.read_text()) - int(used.read_text())
    except (OSError, ValueError):
        return math.inf


def return_memory() -> None:
    """Give back what the allocator keeps for later."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
