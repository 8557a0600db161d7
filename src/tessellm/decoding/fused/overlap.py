"""Launches that overlap: from Hopper on, a launch begins while the one before it still runs.

It may do what depends on nobody, such as fetching weights, and waits before it reads what others wrote or writes
anything. Every kernel waits, so that all launches before the last one are over then, too. Where the device cannot do
this (and in Triton's interpreter) EARLY is False, and nothing of it is compiled.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

ALLOWED = True  # benchmarks/fused_pass.py measures what it brings
KINDS = ("linear", "thin", "residual", "attention", "combine", "embed")
EARLY = dict.fromkeys(KINDS, True)
LETS = dict.fromkeys(KINDS, 1)


def overlapping(device: torch.device, kind: str) -> dict[str, Any]:
    """What a launch is given beside its arguments."""
    able = ALLOWED and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    early = {"EARLY": True, "launch_pdl": True} if able and EARLY[kind] else {"EARLY": False}
    return {**early, "LETS": LETS[kind] if able else 0}


@triton.jit
def let_next_begin(LETS: tl.constexpr, HERE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The next launch may begin as soon as all programs of this one have come here."""
    if LETS == HERE:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_inputs(EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Until the launch before this one is over and what it wrote can be read."""
    if EARLY:
        tl.extra.cuda.gdc_wait()


@triton.jit
def fetch(pointer_N, size_N, EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """So many bytes behind each pointer into the L2 cache: multiples of 16, at multiples of 16; none where below 1."""
    if EARLY:
        tl.inline_asm_elementwise(
            "{ .reg .pred any; setp.gt.s32 any, $2, 0;"
            " @any cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
            "=r,l,r",
            [pointer_N.to(tl.int64), size_N],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
