"""Compositions of the skills benchmark: chains of skills in four training regimes, at several stages of training.

The diagnosis reads what the composition itself writes after prompts, greedily; the accuracy is that of whole outputs
to other prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tessellm.rules import make_rule

from ..common.stacked import Params, Shape, initialise, select, train
from ..skills import chains
from ..skills.chains import REGIMES, Prompts
from ..skills.members import Recipe, gold_rows, wrong
from .compositions import Judged, diagnosed, speak


@dataclass(frozen=True)
class Plan:
    recipe: Recipe
    stages: tuple[int, ...]  # updates of the experts up to each
    counts: tuple[int, ...]
    prompts: int
    tests: int


QUICK = Plan(
    Recipe(Shape(chains.VOCABULARY, 64, 2, 2), skills=(1, 4, 6), steps=2, base_updates=400, base_rows=32,
           base_rate=3e-3, expert_rows=24, expert_rate=2e-3),
    (100, 200, 400), (2, 3), 48, 200,
)  # fmt: skip
FULL = Plan(
    Recipe(Shape(chains.VOCABULARY, 128, 2, 4), dtype=torch.bfloat16, compiled=True), (300, 600, 1200, 2400), (2, 4, 8),
    128, 512,
)  # fmt: skip


def stages(plan: Plan, generator: torch.Generator, log: Callable[[str], None]) -> Iterator[dict[str, Params]]:
    """A regime's base and experts, after each stage. The aligned regime has a base of its own."""
    recipe, device = plan.recipe, generator.device
    regimes = [REGIMES.index(regime) for regime in recipe.regimes]
    base_regime_E = torch.tensor([0, REGIMES.index("clean")], device=device)

    def base_batch() -> tuple[Tensor, Tensor, Tensor]:
        own_E = torch.full_like(base_regime_E, -1)
        return chains.sample_training(own_E, base_regime_E, recipe.base_rows, generator, recipe.steps)

    start = initialise(recipe.shape, 2, generator)
    bases = train(start, recipe.shape, base_batch, recipe.base_updates, recipe.base_rate, dtype=recipe.dtype)
    log("skills: bases")
    own_E = torch.tensor(recipe.skills, device=device).repeat(len(regimes))
    regime_E = torch.tensor(regimes, device=device).repeat_interleave(len(recipe.skills))

    def batch() -> tuple[Tensor, Tensor, Tensor]:
        return chains.sample_training(own_E, regime_E, recipe.expert_rows, generator, recipe.steps)

    count = len(recipe.skills)
    experts, done = select(bases, [int(regime != 0) for regime in regimes for _ in range(count)]), 0
    for updates in plan.stages:
        experts = train(
            experts, recipe.shape, batch, updates - done, recipe.expert_rate, compiled=recipe.compiled,
            dtype=recipe.dtype,
        )  # fmt: skip
        done = updates
        log(f"skills: {updates} updates")
        yield {
            regime: {
                name: torch.cat([bases[name][int(r != 0)][None], experts[name][i * count : (i + 1) * count]])
                for name in bases
            }
            for i, (regime, r) in enumerate(zip(recipe.regimes, regimes, strict=True))
        }


@torch.no_grad()
def judged(seed: int, size: str, device: str, log: Callable[[str], None]) -> Iterator[Judged]:
    plan = FULL if size == "full" else QUICK
    generator = torch.Generator(device=device).manual_seed(seed)
    with torch.enable_grad():
        trained = list(stages(plan, generator, log))
    for stage, by_regime in zip(plan.stages, trained, strict=True):
        for regime, params in by_regime.items():
            for experts in plan.counts:
                for chain in range(1, plan.recipe.steps + 1):
                    prompts, tests = (
                        chains.sample_test(experts, chain, count, generator, plan.recipe.skills)
                        for count in (plan.prompts, plan.tests)
                    )
                    gold = gold_rows(params, plan.recipe, tests)
                    for name in ("evidence", "product"):
                        rule = make_rule(name)
                        right = ~wrong(speak(rule, gold, tests.tokens_BT), tests).any(1)
                        yield Judged(
                            "skills",
                            {"updates": stage, "regime": regime, "experts": experts, "chain": chain, "rule": name},
                            written_by(rule, params, plan, prompts),
                            right.float().mean().item(),
                        )


def written_by(rule: Any, params: Params, plan: Plan, prompts: Prompts) -> Any:
    """The composition continues the prompts, greedily; the diagnosis of what it wrote, up to its stop."""
    start = int(prompts.output_BT[0].int().argmax())
    tokens_BT = prompts.tokens_BT.clone()
    for at in range(start, tokens_BT.shape[1]):
        logp = gold_rows(params, plan.recipe, prompts._replace(tokens_BT=tokens_BT[:, :at]))
        tokens_BT[:, at] = speak(rule, logp, tokens_BT[:, :at])[:, -1].argmax(-1)
    fed_BT = tokens_BT[:, :-1]
    stopped_BT = (fed_BT == chains.STOP).cumsum(1).bool()
    scored_BT = ~stopped_BT & (torch.arange(fed_BT.shape[1], device=fed_BT.device) >= start - 1)
    logp = gold_rows(params, plan.recipe, prompts._replace(tokens_BT=fed_BT))
    return diagnosed(rule, logp, fed_BT, scored_BT, tokens_BT[:, 1:])
