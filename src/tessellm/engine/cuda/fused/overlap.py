"""Launches that overlap: from Hopper on, a launch begins while the one before it still runs.

It may do what depends on nobody, such as loading weights, and waits before it reads what others wrote or writes
anything. Every kernel that begins early waits, so that all launches before the last one are over then, too. A kernel
says where in it the next may begin: too early, and what waits is in the way of what works. Matrix products of many
rows, and those right behind another one, begin in turn: spread over a device that is not free yet, they are slower by
more than their beginnings take. All this was measured (docs/architecture.md). Where the device cannot do it (and in
Triton's interpreter) nothing of it is compiled.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

ALLOWED = True  # benchmarks/fused_pass.py measures what it brings


def overlapping(device: torch.device, early: bool = True) -> dict[str, Any]:
    """Make a launch's settings: whether it lets the next one begin, and whether it begins early itself."""
    able = ALLOWED and device.type == "cuda" and _is_able(device)
    return {"OVERLAP": able, **({"launch_pdl": True} if able and early else {})}


@lru_cache
def _is_able(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def let_next_begin(OVERLAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """The next launch may begin as soon as all programs of this one have come here."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_inputs(OVERLAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Until the launch before this one is over and what it wrote can be read."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
