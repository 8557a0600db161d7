"""Chains of skills as combinations: which a model may train on, which nobody ever does, and texts of either.

A combination is an ordered chain of two or more skills in which none follows itself. Chains that repeat one skill are
no combinations: everyone may train on them, so that a model that saw none still knows what a long chain looks like.

Shapes: E model, B row, J step, L letter, T time, S chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product
from typing import NamedTuple

import torch
from torch import Tensor

from ..skills import chains
from ..skills.chains import LENGTH, LETTERS, Prompts

Chain = tuple[int, ...]


class Split(NamedTuple):
    """Combinations of all lengths: held out for good, and the others in the order in which growing shares take them."""

    held_out: list[Chain]
    trainable: list[Chain]

    def seen(self, share: float) -> list[Chain]:
        """The combinations that a model with this share of all of them trains on."""
        return self.trainable[: round(share * (len(self.trainable) + len(self.held_out)))]


def combinations(skills: tuple[int, ...], length: int) -> list[Chain]:
    return [chain for chain in product(skills, repeat=length) if all(a != b for a, b in pairwise(chain))]


def split(skills: tuple[int, ...], steps: int, held_out: float, seed: int) -> Split:
    """A share of the combinations of each length is held out; the rest is shuffled, lengths mixed."""
    generator = torch.Generator().manual_seed(seed)
    away: list[Chain] = []
    left: list[Chain] = []
    for length in range(2, steps + 1):
        every = combinations(skills, length)
        order = torch.randperm(len(every), generator=generator).tolist()
        count = round(held_out * len(every))
        away += [every[index] for index in order[:count]]
        left += [every[index] for index in order[count:]]
    order = torch.randperm(len(left), generator=generator).tolist()
    return Split(away, [left[index] for index in order])


class ChainTable:
    """What each model of a stack may train on: chains by length, padded so that they can be drawn on the device."""

    def __init__(self, seen_E: list[list[Chain]], skills: tuple[int, ...], steps: int, device: str):
        rows = [[[(s,) * n for s in skills] + [c for c in seen if len(c) == n] for n in range(1, steps + 1)]
                for seen in seen_E]  # fmt: skip
        longest = max(len(part) for row in rows for part in row)
        self.steps = steps
        self.count_EN = torch.tensor([[len(part) for part in row] for row in rows], device=device)
        table = torch.zeros(len(rows), steps, longest, steps, dtype=torch.long)
        for e, row in enumerate(rows):
            for n, part in enumerate(row):
                for s, chain in enumerate(part):
                    table[e, n, s, : len(chain)] = torch.tensor(chain)
        self.chain_ENSJ = table.to(device)

    def batch(self, rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs, targets and loss mask [E, B, T]: a random length, then a random chain of that length."""
        device, models = self.count_EN.device, len(self.count_EN)
        length_EB = torch.randint(self.steps, (models, rows), generator=generator, device=device)
        at_EB = torch.rand(models, rows, generator=generator, device=device)
        count_EB = self.count_EN.gather(1, length_EB)
        index_EB = (at_EB * count_EB).long().clamp(max=count_EB - 1)
        model_E1 = torch.arange(models, device=device)[:, None]
        skill_EBJ = self.chain_ENSJ[model_E1, length_EB, index_EB]
        text = [torch.randint(LETTERS, (models, rows, LENGTH), generator=generator, device=device)]
        for j in range(self.steps):
            text.append(chains.transform(text[-1], skill_EBJ[..., j]))
        made = chains.render(skill_EBJ, torch.stack(text, -2), length_EB + 1)
        return made.tokens[..., :-1], made.tokens[..., 1:], made.output[..., 1:].float()


def gold(chosen: Sequence[Chain], skills: tuple[int, ...], rows: int, generator: torch.Generator) -> Prompts:
    """`rows` texts of these chains, all of one length, in turn; every skill's expert is there to be composed."""
    device = generator.device
    chain_SJ = torch.tensor(chosen, device=device)
    skill_BJ = chain_SJ[torch.arange(rows, device=device) % len(chosen)]
    text = [torch.randint(LETTERS, (rows, LENGTH), generator=generator, device=device)]
    for j in range(chain_SJ.shape[1]):
        text.append(chains.transform(text[-1], skill_BJ[:, j]))
    made = chains.render(skill_BJ, torch.stack(text, -2), torch.full((rows,), chain_SJ.shape[1], device=device))
    slot_of = torch.full((len(chains.SKILLS),), -1, device=device)
    slot_of[list(skills)] = torch.arange(1, len(skills) + 1, device=device)
    owner_BJ = torch.cat([torch.zeros_like(skill_BJ[:, :1]), slot_of[skill_BJ]], 1)
    experts_BK = torch.tensor(skills, device=device).expand(rows, -1)
    return Prompts(made.tokens, made.output, made.step, experts_BK, owner_BJ.gather(1, made.step))
