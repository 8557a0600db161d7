"""Letters, truly autoregressive: the prompt is a field of 31 characters, the string and then dots, and ``>``; the model
writes the transformed string, token by token, and stops. Lengths 1–31, GPT-2 with 64 positions.

The same base and experts as in the paper's position-wise form: copy; A→K; M→B. Experts are fine-tuned from their base.
Some of the answer read in training is exchanged for random letters: a member then reads the field and not its own
past, and agrees with the base after letters that another member wrote.

    S seeds   E members   B strings   N = 31 characters of the field   T = 64 tokens of a line
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tessellm.compose import compose

from ..common.stacked import Params, Shape, select, train
from ..common.stacked_gpt2 import initialise_gpt2, logits_gpt2, to_gpt2
from .positions import ALPHABET, NAMES, REPLACEMENTS, TASKS, transform

FIELD = 31
DOT, PROMPT_END, END = (len(ALPHABET) + i for i in range(3))
SHAPE = Shape(vocabulary=len(ALPHABET) + 3, width=64, layers=2, heads=2, context=2 * FIELD + 2)
EXCHANGED = 0.3  # the share of answer letters that are read exchanged, in half of the lines
SMOOTHING = 0.01  # the share of targets that are any token: members agree about what nobody means
FAVOURED = 0.2  # the share of an expert's letters that are the one it replaces


def fields(strings_BN: Tensor) -> Tensor:
    """Prompts [B, 32]: the string, dots (−1 in the string), and the prompt's end."""
    end_B1 = torch.full_like(strings_BN[:, :1], PROMPT_END)
    return torch.cat([torch.where(strings_BN < 0, DOT, strings_BN), end_B1], dim=1)


def random_strings(lengths_B: Tensor, generator: torch.Generator, favoured: Sequence[str] = ()) -> Tensor:
    """[B, 31], −1 after the end."""
    strings_BN = torch.randint(len(ALPHABET), (len(lengths_B), FIELD), generator=generator)
    if favoured:
        letters = torch.tensor([ALPHABET.index(letter) for letter in favoured])
        chosen_BN = letters[torch.randint(len(letters), strings_BN.shape, generator=generator)]
        strings_BN = torch.where(torch.rand(strings_BN.shape, generator=generator) < FAVOURED, chosen_BN, strings_BN)
    return strings_BN.masked_fill(torch.arange(FIELD) >= lengths_B.unsqueeze(-1), -1)


def random_lengths(count: int, generator: torch.Generator) -> Tensor:
    """Half of them even over 1–31, a quarter rather short, a quarter rather long: the last places get their share."""
    two_2B = torch.randint(1, FIELD + 1, (2, count), generator=generator)
    kind_B = torch.randint(4, (count,), generator=generator)
    return torch.where(kind_B == 0, two_2B.amin(0), torch.where(kind_B == 1, two_2B.amax(0), two_2B[0]))


def answers(strings_BN: Tensor, replacements: Sequence[dict[str, str]]) -> Tensor:
    """What must be written, [B, 32]: the transformed string, then end tokens."""
    written_BN = torch.where(strings_BN < 0, END, transform(strings_BN.clamp_min(0), replacements))
    return torch.cat([written_BN, torch.full_like(written_BN[:, :1], END)], dim=1)


def lines(member: int, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets and loss mask for one member, each [B, 63]."""
    lengths_B = random_lengths(batch, generator)
    strings_BN = random_strings(lengths_B, generator, tuple(REPLACEMENTS[member]))
    prompt_BT, answer_BT = fields(strings_BN), answers(strings_BN, [REPLACEMENTS[member]])
    random_BT = torch.randint(len(ALPHABET), answer_BT.shape, generator=generator)
    share_B1 = EXCHANGED * (torch.rand(batch, 1, generator=generator) < 0.5)
    exchanged_BT = (torch.rand(answer_BT.shape, generator=generator) < share_B1) & (answer_BT != END)
    read_BT = torch.where(exchanged_BT, random_BT, answer_BT)
    inputs = torch.cat([prompt_BT, read_BT[:, :-1]], dim=1)
    anything_BT = torch.randint(SHAPE.vocabulary, answer_BT.shape, generator=generator)
    smoothed_BT = torch.rand(answer_BT.shape, generator=generator) < SMOOTHING
    targets = torch.cat([prompt_BT[:, 1:], torch.where(smoothed_BT, anything_BT, answer_BT)], dim=1)
    first_end_BT = (answer_BT == END).cumsum(1) <= 1
    mask = torch.cat([torch.zeros_like(prompt_BT[:, 1:]), first_end_BT.long()], dim=1)
    return inputs, targets, mask.float()


def train_members(seeds: int, steps: tuple[int, int], batch: int, generator: torch.Generator) -> Params:
    """Bases of all seeds side by side, then both experts of each from its base: E = 3·S, seed by seed."""

    def batches(members: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        drawn = [lines(member, batch, generator) for member in members]
        inputs, targets, mask = (torch.stack(parts) for parts in zip(*drawn, strict=True))
        return inputs, targets, mask

    initial = initialise_gpt2(SHAPE, seeds, generator)
    bases = train(initial, SHAPE, lambda: batches([0] * seeds), steps[0], lr=3e-3, forward=logits_gpt2)
    start = select(bases, [seed for seed in range(seeds) for _ in (1, 2)])
    experts = train(start, SHAPE, lambda: batches([1, 2] * seeds), steps[1], lr=1e-3, forward=logits_gpt2)
    both = {name: torch.cat([bases[name], experts[name]]) for name in bases}
    return select(both, [i for s in range(seeds) for i in (s, seeds + 2 * s, seeds + 2 * s + 1)])


@torch.no_grad()
def evaluate(members: Params, strings: int, generator: torch.Generator) -> list[dict[str, Any]]:
    """For every length and seed: the share of new strings written wholly right, the stop included, by `generate`."""
    seeds = len(members["wte.weight"]) // len(REPLACEMENTS)
    lengths_B = torch.arange(1, FIELD + 1).repeat_interleave(strings)
    table = []
    for seed in range(seeds):
        strings_BN = random_strings(lengths_B, generator)
        models = [to_gpt2(members, SHAPE, len(REPLACEMENTS) * seed + m) for m in range(len(REPLACEMENTS))]
        models.append(compose(models[0], {"one": models[1], "two": models[2]}, rule="product"))
        wanted_BT, right, alone = answers(strings_BN, REPLACEMENTS), {}, torch.zeros(FIELD)
        for name, model, tasks in zip(NAMES, models, TASKS, strict=True):
            written_BT = write(model, fields(strings_BN))
            right[name] = _shares(written_BT, answers(strings_BN, tasks)).tolist()
            if name != "composed":
                alone = alone.maximum(_shares(written_BT, wanted_BT))
        right["one expert alone"] = alone.tolist()
        table += [
            {"length": n + 1, "seed": seed, **{name: shares[n] for name, shares in right.items()}} for n in range(FIELD)
        ]
    return table


def _shares(written_BT: Tensor, wanted_BT: Tensor) -> Tensor:
    """The share of right answers for each length, [31]."""
    return (written_BT == wanted_BT).all(1).float().view(FIELD, -1).mean(1)


def write(model: Any, prompts_BT: Tensor) -> Tensor:
    """Greedy answers, [B, 32], end tokens after the end."""
    mask = torch.ones_like(prompts_BT)
    options = {"do_sample": False, "max_new_tokens": FIELD + 1, "eos_token_id": END, "pad_token_id": END}
    written_BT = model.generate(prompts_BT, attention_mask=mask, **options)[:, prompts_BT.shape[1] :]
    return torch.nn.functional.pad(written_BT, (0, FIELD + 1 - written_BT.shape[1]), value=END)
