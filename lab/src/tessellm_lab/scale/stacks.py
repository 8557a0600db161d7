"""Which runs are made, at either size. A stack is one computation: runs that share network, family and schedule."""

from __future__ import annotations

from dataclasses import replace

import torch

from .encodings import ENCODINGS, FEWSHOT, NAMES
from .networks import Mlp, Transformer
from .training import Run, Stack

SHARES = (0.5, 0.75, 0.9)  # held out, beside a quarter
OTHER_SUPPORTS = ("equal", "popular", "unpopular", "disconnected", "non_compositional")


def stacks(size: str, seed: int) -> list[Stack]:
    """Everything that `reproduce scale` trains, in order."""
    return _full(seed) if size == "full" else _small(seed)


def _sweep(seeds: list[int], shares: tuple[float, ...]) -> tuple[Run, ...]:
    """The runs of the reference network: seeds, shares held out, supports, and encodings that are functions of z."""
    return (
        *(Run(seed=seed) for seed in seeds),
        *(Run(held_out=share, seed=seed) for share in shares for seed in seeds),
        *(Run(support=support, seed=seeds[0]) for support in OTHER_SUPPORTS),
        *(Run(encoding=name, seed=seeds[0]) for name in ENCODINGS if name != "identity"),
    )


def _small(seed: int) -> list[Stack]:
    seeds = [seed, seed + 1]
    plain = tuple(Run(seed=s) for s in seeds)
    shares = tuple(Run(held_out=share, seed=seed) for share in (0.25, *SHARES))
    teacher = Stack("reference", _sweep(seeds, SHARES), Mlp(128, 3), 1500, modules=8, size=8, tasks=32, rate=1e-3)
    grid = Stack("grid", shares, Mlp(96, 2), 1200, "grid", modules=8, size=16, tasks=32, rate=1e-3, decay=1e-3)
    return [
        *(replace(teacher, name=f"width-{width}", runs=plain, network=Mlp(width, 3)) for width in (16, 32, 64)),
        *(replace(teacher, name=f"depth-{depth}", runs=plain, network=Mlp(128, depth)) for depth in (1, 2)),
        teacher,
        replace(teacher, name="fewshot", runs=(Run(FEWSHOT, seed=seed),)),
        replace(teacher, name="transformer", runs=plain[:1], network=Transformer(32, 2, 2), steps=800),
        replace(grid, name="grid-16", runs=shares[:1], network=Mlp(16, 2)),
        grid,
    ]


def _full(seed: int) -> list[Stack]:
    """Small stacks side by side first, then the reference, then the six encodings' long runs, which can be stopped."""
    seeds = [seed, seed + 1, seed + 2]
    plain = tuple(Run(seed=s) for s in seeds)
    shares = tuple(Run(held_out=share, seed=s) for share in (0.25, *SHARES) for s in seeds)
    teacher = Stack("reference", _sweep(seeds, (*SHARES, 0.95)), Mlp(), 30_000, dtype=torch.bfloat16)
    small = replace(teacher, runs=plain, beside="small")
    grid = replace(small, name="grid", runs=shares, network=Mlp(1024, 2), family="grid", rate=1e-4, decay=1e-3)
    return [
        *(replace(small, name=f"width-{w}", network=Mlp(w)) for w in (32, 64, 128, 256, 512)),
        *(replace(small, name=f"depth-{depth}", network=Mlp(1024, depth)) for depth in (1, 2)),
        replace(small, name="fewshot", runs=(Run(FEWSHOT, seed=seed),)),
        replace(small, name="transformer", runs=plain[:1], network=Transformer()),
        *(replace(grid, name=f"grid-{width}", runs=shares[:3], network=Mlp(width, 2)) for width in (64, 256)),
        grid,
        teacher,
        replace(teacher, name="long", runs=tuple(Run(encoding=name, seed=seed) for name in NAMES), steps=300_000),
    ]
