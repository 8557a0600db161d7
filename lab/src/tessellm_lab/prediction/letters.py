"""Compositions of the many-experts benchmark: letters replaced, position-wise, by up to thirteen experts.

Members are judged as they were after each of several stages of training. Beside the thirteen disjoint experts there are
rivals, which replace a letter that another expert replaces as well, by a third one; the first expert's answer is right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tessellm.rules import make_rule

from ..common.stacked import Params, select, train
from ..common.stacked_gpt2 import initialise_gpt2, logits_gpt2
from ..letters.many_experts import CHARACTERS, EXPERTS, SHAPE, STRINGS, TRAINED_LENGTH, replacements, target
from .compositions import Judged, diagnosed, speak


@dataclass(frozen=True)
class Plan:
    """How members are trained and which compositions are made of them."""

    stages: tuple[int, ...]  # updates up to each
    counts: tuple[int, ...]  # experts
    lengths: tuple[int, ...]
    weights: tuple[float, ...]
    prompts: int  # unlabelled
    tests: int
    rivals: int = 3
    batch: int = 20
    rate: float = 2e-3


QUICK = Plan((60, 120, 240), (2, 4, 7, 13), (16, 31), (0.5, 1.0), 48, 200)
FULL = Plan((150, 300, 600, 1500, 4000), (1, 2, 3, 4, 5, 6, 8, 10, 13), (8, 16, 31), (0.5, 0.8, 1.0), 128, 1000)


def stages(plan: Plan, pairs: Tensor, generator: torch.Generator, log: Callable[[str], None]) -> Iterator[Params]:
    """Base, experts and rivals after each stage; `pairs` are the replacements [experts + rivals, 2]."""
    members, device = len(pairs) + 1, generator.device
    strings = torch.randint(CHARACTERS, (members, STRINGS, TRAINED_LENGTH), generator=generator, device=device)
    wanted = torch.stack([strings[0], *(target(strings[i + 1], pairs[i : i + 1]) for i in range(len(pairs)))])
    mask = torch.ones(members, plan.batch, TRAINED_LENGTH, device=device)

    def batch() -> tuple[Tensor, Tensor, Tensor]:
        at = torch.randint(STRINGS, (plan.batch,), generator=generator, device=device)
        return strings[:, at], wanted[:, at], mask

    params = initialise_gpt2(SHAPE, members, generator)
    noisy, done = partial(logits_gpt2, training=True), 0
    for updates in plan.stages:
        params = train(params, SHAPE, batch, updates - done, plan.rate, forward=noisy)
        done = updates
        log(f"letters: {updates} updates")
        yield params


@torch.no_grad()
def judged(seed: int, size: str, device: str, log: Callable[[str], None]) -> Iterator[Judged]:
    plan = FULL if size == "full" else QUICK
    torch.manual_seed(seed)  # dropout
    generator = torch.Generator(device=device).manual_seed(seed)
    pairs = replacements(generator)
    thirds = pairs[:, 1].roll(1)[: plan.rivals]
    every = torch.cat([pairs, torch.stack([pairs[: plan.rivals, 0], thirds], 1)])
    with torch.enable_grad():
        trained = list(stages(plan, every, generator, log))
    for stage, params in zip(plan.stages, trained, strict=True):
        for length in plan.lengths:
            prompts, tests = (
                torch.randint(CHARACTERS, (count, length), generator=generator, device=device)
                for count in (plan.prompts, plan.tests)
            )
            logp_A, logp_B = (all_rows(params, text) for text in (prompts, tests))
            for experts, rivals in [(count, 0) for count in plan.counts] + [(2, 1), (4, plan.rivals)]:
                chosen = [0, *range(1, experts + 1), *range(EXPERTS + 1, EXPERTS + 1 + rivals)]
                wanted = target(tests, pairs[:experts])
                for rule, weight in [("evidence", 1.0)] + [("product", weight) for weight in plan.weights]:
                    made = make_rule(rule, [weight] * (len(chosen) - 1))
                    right = (speak(made, logp_B[chosen], tests).argmax(-1) == wanted).all(1)
                    written = speak(made, logp_A[chosen], prompts).argmax(-1)
                    scored = torch.ones_like(prompts, dtype=torch.bool)
                    yield Judged(
                        "letters",
                        {"updates": stage, "length": length, "experts": experts, "rivals": rivals, "rule": rule,
                         "weight": weight},
                        diagnosed(made, logp_A[chosen], prompts, scored, written),
                        right.float().mean().item(),
                    )  # fmt: skip


def all_rows(params: Params, text: Tensor) -> Tensor:
    members = len(next(iter(params.values())))
    return logits_gpt2(select(params, list(range(members))), SHAPE, text[None].expand(members, -1, -1)).log_softmax(-1)
