"""A base that writes the letter before, and experts that replace one letter each, kept at several ages of fine-tuning.

Sliding-window transformers of `lengths.members`, position-wise: the output at t is the letter at t−1, and expert i
turns its letter into another. Skills are disjoint: expert i acts where its letter stands, and only there.

    K experts   B strings   T positions   V vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ..common.stacked import Params, initialise, select, train
from ..lengths.members import LAG, SHAPE, logits
from ..letters.positions import ALPHABET

LENGTH = 16
PAIRS = ("AK", "MB", "SQ", "EX", "TG", "OF")
forward = partial(logits, "window")


def tables(pairs: Sequence[str]) -> Tensor:
    """Every letter's replacement, for each pair alone: [K, V]."""
    table_KV = torch.arange(len(ALPHABET)).repeat(len(pairs), 1)
    for row_V, pair in zip(table_KV, pairs, strict=True):
        row_V[ALPHABET.index(pair[0])] = ALPHABET.index(pair[1])
    return table_KV


def strings(count: int, generator: torch.Generator, favoured: str = "", share: float = 0.25) -> Tensor:
    """Random strings [B, T]; a share of the letters is the favoured one."""
    strings_BT = torch.randint(len(ALPHABET), (count, LENGTH), generator=generator)
    if favoured:
        chosen_BT = torch.rand(strings_BT.shape, generator=generator) < share
        strings_BT = torch.where(chosen_BT, ALPHABET.index(favoured), strings_BT)
    return strings_BT


def before(strings_BT: Tensor) -> Tensor:
    """The letter that the output at each position is made of."""
    return strings_BT.roll(LAG, dims=-1)


def train_base(steps: int, batch: int, generator: torch.Generator) -> Params:
    """One base from scratch."""
    mask = (torch.arange(LENGTH) >= LAG).float()

    def draw() -> tuple[Tensor, Tensor, Tensor]:
        strings_BT = strings(batch, generator)
        return strings_BT[None], before(strings_BT)[None], mask.expand(1, batch, -1)

    return train(initialise(SHAPE, 1, generator), SHAPE, draw, steps, lr=3e-3, forward=forward)


def fine_tune(
    base: Params, ages: Sequence[int], batch: int, rate: float, generator: torch.Generator
) -> dict[int, Params]:
    """All experts from the base, side by side, as they are after each of `ages` steps of AdamW at a constant rate."""
    table_KV = tables(PAIRS)
    params = {name: p.clone().requires_grad_() for name, p in select(base, [0] * len(PAIRS)).items()}
    optimiser = torch.optim.AdamW(params.values(), lr=rate, weight_decay=0.0, fused=True)
    kept = {}
    for step in range(max(ages) + 1):
        if step in ages:
            kept[step] = {name: p.detach().clone() for name, p in params.items()}
        strings_KBT = torch.stack([strings(batch, generator, pair[0]) for pair in PAIRS])
        wanted_KBT = torch.stack([row_V[before(s)] for row_V, s in zip(table_KV, strings_KBT, strict=True)])
        logits_KBTV = forward(params, SHAPE, strings_KBT)[:, :, LAG:]
        loss = cross_entropy(logits_KBTV.flatten(0, 2), wanted_KBT[:, :, LAG:].flatten())
        optimiser.zero_grad(set_to_none=True)
        (loss * len(PAIRS)).backward()
        optimiser.step()
    return kept


def merged(base: Params, experts: Params, which: Sequence[int]) -> Params:
    """Eq. 5: θ_b + Σ_i (θ_i − θ_b) over the experts chosen."""
    return {name: base[name] + (experts[name][list(which)] - base[name]).sum(0, keepdim=True) for name in base}
