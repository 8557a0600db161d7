"""Letters as the paper ran them (App. C.1): position t's output is the transformed character t, not a next token.

27 characters, 2,000 random strings of 16 for each member, five epochs of AdamW at 3e-4, one string a step, GPT-2 with 2
layers of width 64. The base copies; one expert turns A into K, the other M into B. Members of all seeds are trained
from scratch side by side, each on strings of its own.

    S seeds   E = 3·S members, seed by seed: base, A→K, M→B   B strings   T positions
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from tessellm.rules import product, product_scores

from ..common.stacked import Params, Shape
from ..common.stacked_gpt2 import initialise_gpt2, logits_gpt2

ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ "
REPLACEMENTS: tuple[dict[str, str], ...] = ({}, {"A": "K"}, {"M": "B"})
TASKS = (*((pairs,) for pairs in REPLACEMENTS), REPLACEMENTS)
NAMES = ("base", "A→K", "M→B", "composed")
SHAPE = Shape(vocabulary=len(ALPHABET), width=64, layers=2, heads=2, context=32)
TRAINED_LENGTH, STRINGS, EPOCHS, RATE = 16, 2000, 5, 3e-4
LENGTHS = tuple(range(1, 32))


def transform(strings: Tensor, replacements: Sequence[dict[str, str]]) -> Tensor:
    """All replacements at once."""
    table = torch.arange(len(ALPHABET))
    for pairs in replacements:
        for old, new in pairs.items():
            table[ALPHABET.index(old)] = ALPHABET.index(new)
    return table[strings]


def train_members(
    seeds: int,
    generator: torch.Generator,
    strings: int = STRINGS,
    epochs: int = EPOCHS,
    report: Callable[[int, Tensor], None] | None = None,
) -> Params:
    """All members of all seeds."""
    members = len(REPLACEMENTS) * seeds
    inputs_ENT = torch.randint(len(ALPHABET), (members, strings, TRAINED_LENGTH), generator=generator)
    targets_ENT = torch.stack(
        [transform(strings_NT, [REPLACEMENTS[m % len(REPLACEMENTS)]]) for m, strings_NT in enumerate(inputs_ENT)]
    )
    return _train(initialise_gpt2(SHAPE, members, generator), inputs_ENT, targets_ENT, epochs, generator, report)


def _train(
    params: Params,
    inputs_ENT: Tensor,
    targets_ENT: Tensor,
    epochs: int,
    generator: torch.Generator,
    report: Callable[[int, Tensor], None] | None,
) -> Params:
    """Plain AdamW, one string a step, each epoch in a new order; summed losses give every member its own gradient."""
    params = {name: p.requires_grad_() for name, p in params.items()}
    optimiser = torch.optim.AdamW(params.values(), lr=RATE, fused=True)
    members, strings, _ = inputs_ENT.shape
    each_E = torch.arange(members)
    for epoch in range(epochs):
        order_EN = torch.rand(members, strings, generator=generator).argsort(-1)
        for number_E in order_EN.unbind(1):
            tokens_EBT, target_EBT = (x[each_E, number_E].unsqueeze(1) for x in (inputs_ENT, targets_ENT))
            out_EBTV = logits_gpt2(params, SHAPE, tokens_EBT, training=True)
            nll = cross_entropy(out_EBTV.flatten(0, 2), target_EBT.flatten(), reduction="none")
            loss_E = nll.view(members, -1).mean(1)
            optimiser.zero_grad(set_to_none=True)
            loss_E.sum().backward()
            optimiser.step()
        if report is not None:
            report(epoch, loss_E.detach())
    return {name: p.detach() for name, p in params.items()}


@torch.no_grad()
def evaluate(members: Params, strings: int, generator: torch.Generator) -> list[dict[str, Any]]:
    """For every length and seed: the share of new strings that each model gets wholly right, and Eq. 2's |log Z|.

    A member is held to its own task, the composition to both; `one expert alone` is the better member held to both. At
    length 1 all 27 strings are tried.
    """
    count = len(members["wte.weight"])
    seeds = count // len(REPLACEMENTS)
    table = []
    for length in LENGTHS:
        if length == 1:
            strings_BT = torch.arange(len(ALPHABET)).unsqueeze(-1)
        else:
            strings_BT = torch.randint(len(ALPHABET), (strings, length), generator=generator)
        logp_EBTV = logits_gpt2(members, SHAPE, strings_BT.expand(count, -1, -1)).log_softmax(-1)
        logp_SMBTV = logp_EBTV.unflatten(0, (seeds, len(REPLACEMENTS)))
        for seed, logp_MBTV in enumerate(logp_SMBTV):
            log_z = product_scores(logp_MBTV).logsumexp(-1).abs()
            laws = [*logp_MBTV, product(logp_MBTV)]
            right = [_right(law, strings_BT, tasks) for law, tasks in zip(laws, TASKS, strict=True)]
            scores = dict(zip(NAMES, right, strict=True))
            alone = max(_right(law, strings_BT, REPLACEMENTS) for law in logp_MBTV)
            row = {"length": length, "seed": seed, **scores, "one expert alone": alone, "log_z": float(log_z.max())}
            table.append(row)
    return table


def _right(logp_BTV: Tensor, strings_BT: Tensor, replacements: Sequence[dict[str, str]]) -> float:
    return float((logp_BTV.argmax(-1) == transform(strings_BT, replacements)).all(-1).float().mean())
