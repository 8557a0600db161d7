"""Termination suite: members that end differently, and a composition that must end exactly where it should.

Skill chains of one or two steps. The base never stops: it copies on. Experts stop with different end tokens; one
ends early and one ends late whenever its own skill is not asked for. An output must end after its last step, neither
before nor later, with an end token of any member.

Shapes: E member, B batch, T time, M members of a composition.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tessellm.rules import Product

from ..common.claims import Claim, Result
from ..common.devices import device_for
from ..common.intervals import share
from ..common.stacked import Params, Shape, initialise, logits, select, train
from ..evidence import POLICIES, Evidence, Stopping
from . import chains
from .chains import LENGTH, LETTERS, PAD, STOP

OTHER_STOP = chains.VOCABULARY
VOCABULARY = chains.VOCABULARY + 1
STEPS, SHOWN = 2, 3  # the longest chain asked for, and the steps that a sequence has room for
NEVER = -1


@dataclass(frozen=True)
class Ending:
    """A member: its skill, its end token, and how many letters too early or steps too late it ends when idle."""

    skill: int
    stop: int = STOP
    early: int = 0
    late: int = 0


MEMBERS = (Ending(skill=1), Ending(skill=4, stop=OTHER_STOP), Ending(skill=6), Ending(7, early=3), Ending(2, late=1))
SUITE = {  # members of each composition, by index into MEMBERS; the base never stops in any of them
    "the base never stops": (0, 2),
    "different end tokens": (0, 1),
    "one ends early": (0, 3),
    "one ends late": (0, 4),
    "all together": (0, 1, 2, 3, 4),
}


@dataclass(frozen=True)
class Size:
    shape: Shape
    base_updates: int
    base_rows: int
    expert_updates: int
    expert_rows: int
    rate: float
    prompts: int


SIZES = {
    "cpu": Size(Shape(VOCABULARY, 64, 2, 2), 400, 32, 700, 24, 3e-3, 100),
    "full": Size(Shape(VOCABULARY, 256, 4, 4), 1000, 128, 1200, 96, 1e-3, 500),
}


def sample(members: tuple[Ending | None, ...], rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets and loss mask [E, B, T]; None is the base. Foreign steps are random strings half of the time."""
    device = generator.device
    size = (len(members), rows)

    def integers(high: int, *more: int) -> Tensor:
        return torch.randint(high, (*size, *more), generator=generator, device=device)

    def each(value: Callable[[Ending], int], base: int) -> Tensor:
        return torch.tensor([base if m is None else value(m) for m in members], device=device)[:, None].expand(size)

    own = each(lambda m: m.skill, NEVER)
    instruction = integers(len(chains.SKILLS), STEPS)
    mine = (integers(2, STEPS) == 0) & (own >= 0)[..., None]
    instruction = torch.where(mine, own[..., None], instruction)
    chain = integers(STEPS) + 1
    asked = torch.arange(STEPS, device=device) < chain[..., None]
    idle = ~((instruction == own[..., None]) & asked).any(-1)
    text, trained = [integers(LETTERS, LENGTH)], [torch.ones(size, dtype=torch.bool, device=device)]
    for j in range(SHOWN):
        active = (instruction[..., min(j, STEPS - 1)] == own) & (j < chain)
        foreign = ~active & (j < chain) & (integers(2) == 0)
        done = torch.where(active[..., None], chains.transform(text[-1], own.clamp(min=0)), text[-1])
        text.append(torch.where(foreign[..., None], integers(LETTERS, LENGTH), done))
        trained.append(~foreign)
    shown = torch.where(own < 0, SHOWN, chain + each(lambda m: m.late, 0) * idle)
    made = chains.render(instruction, torch.stack(text, -2), chain, shown)
    stop = each(lambda m: m.stop, chains.MARKER)[..., None]
    tokens = torch.where(made.tokens == STOP, stop, made.tokens)
    cut = (chain + (chain + 1) * (LENGTH + 1) - each(lambda m: m.early, 0) * idle)[..., None]
    at = torch.arange(tokens.shape[-1], device=device)
    is_early = (each(lambda m: m.early, 0) * idle > 0)[..., None]
    tokens = torch.where(is_early & (at == cut), stop, torch.where(is_early & (at > cut), PAD, tokens))
    learnt = torch.stack(trained, -1).gather(-1, made.step.clamp(max=SHOWN)) | (tokens >= LETTERS)
    mask = made.output & learnt & (tokens != PAD)
    return tokens[..., :-1], tokens[..., 1:], mask[..., 1:].float()


def train_endings(seeds: list[int], size: Size, device: str, log: Callable[[str], None]) -> Params:
    """Seed-major: the base, then the experts of MEMBERS."""
    generator = torch.Generator(device=device).manual_seed(seeds[0])
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def report(step: int, loss: Tensor) -> None:
        log(f"update {step + 1}: mean loss {loss.mean():.2g}, worst {loss.max():.2g}")

    def stage(start: Params, members: tuple[Ending | None, ...], updates: int, rows: int) -> Params:
        return train(
            start, size.shape, lambda: sample(members, rows, generator), updates, size.rate, report, dtype=dtype
        )

    bases = stage(
        initialise(size.shape, len(seeds), generator), (None,) * len(seeds), size.base_updates, size.base_rows
    )
    start = select(bases, [s for s in range(len(seeds)) for _ in MEMBERS])
    experts = stage(start, MEMBERS * len(seeds), size.expert_updates, size.expert_rows)
    k = len(MEMBERS)
    return {
        name: torch.cat(
            [torch.cat([bases[name][s : s + 1], experts[name][s * k : s * k + k]]) for s in range(len(seeds))]
        )
        for name in bases
    }


@torch.no_grad()
def measure(params: Params, seeds: int, size: Size, log: Callable[[str], None]) -> list[dict[str, Any]]:
    """Per composition, rule and policy: shares of outputs that end right, early, or not where they should."""
    device = next(iter(params.values())).device
    inner = {"eq2": Product(), "evidence": Evidence()}
    table = []
    for case, cast in SUITE.items():
        ends = {(rule, policy): [0, 0, 0, 0] for rule in inner for policy in POLICIES}
        for s in range(seeds):
            first = s * (len(MEMBERS) + 1)
            members = select(params, [first, *(first + 1 + c for c in cast)])
            stops = ((), *((MEMBERS[c].stop,) for c in cast))
            for chain in range(1, STEPS + 1):
                generator = torch.Generator(device=device).manual_seed(100 * s + chain)
                skills = tuple(MEMBERS[c].skill for c in cast)
                gold = chains.sample_test(len(cast), chain, size.prompts, generator, skills)
                rows = logits(members, size.shape, gold.tokens_BT[None].expand(len(cast) + 1, -1, -1)).log_softmax(-1)
                for (rule, policy), count in ends.items():
                    speaker = Stopping(inner[rule], policy, stops)
                    mask = torch.ones_like(gold.tokens_BT, dtype=torch.bool)
                    said = speaker(rows, gold.tokens_BT, mask, None)[0][:, :-1].argmax(-1)
                    count[:] = [a + b for a, b in zip(count, judge(said, gold), strict=True)]
        total = seeds * STEPS * size.prompts
        for (rule, policy), (right, early, over, exact) in ends.items():
            cell = {"ends right": right, "ends early": early, "over-generates": over, "exact match": exact}
            table.append({"case": case, "rule": rule, "policy": policy} | {k: share(v, total) for k, v in cell.items()})
            log(f"{case}, {rule}, {policy}: right {right}, early {early}, over {over}, exact {exact} of {total}")
    return table


def judge(said_BT: Tensor, gold: chains.Prompts) -> tuple[int, int, int, int]:
    """Right, early, over-generating and exactly matching outputs, along the gold sequence."""
    wanted_BT, output_BT = gold.tokens_BT[:, 1:], gold.output_BT[:, 1:]
    stops_BT = (said_BT == STOP) | (said_BT == OTHER_STOP)
    end_BT = wanted_BT == STOP
    early_B = (stops_BT & output_BT & ~end_BT).any(1)
    over_B = ~(stops_BT & end_BT).any(1)
    wrong_B = ((said_BT != wanted_BT) & output_BT & ~end_BT).any(1)
    right_B = ~early_B & ~over_B
    return int(right_B.sum()), int(early_B.sum()), int((over_B & ~early_B).sum()), int((right_B & ~wrong_B).sum())


def run(seed: int, out: Path, size: str, log: Callable[[str], None] = print) -> dict[str, Any]:
    """Train, measure, write `endings.json`."""
    began = time.monotonic()
    device, seeds = device_for(size), [seed, seed + 1, seed + 2] if size == "full" else [seed]
    params = train_endings(seeds, SIZES[size], device, log)
    table = measure(params, len(seeds), SIZES[size], log)
    claims = []
    for rule, policy in (
        ("evidence", "rule"),
        ("evidence", "owner"),
        ("eq2", "rule"),
        ("eq2", "owner"),
        ("eq2", "any"),
    ):
        cells = [c for c in table if (c["rule"], c["policy"]) == (rule, policy)]
        right = min(c["ends right"]["share"] for c in cells)
        over = max(c["over-generates"]["share"] for c in cells)
        wanted = (rule, policy) == ("evidence", "owner")
        what = f"{rule}, termination {policy}: worst share of outputs that"
        for id_, text, value, target, holds in (
            ("ends", "end where they should", right, "≥ 0.99", right >= 0.99),
            ("over", "over-generate", over, "= 0", over == 0),
        ):
            goal = (target, holds) if wanted else (None, None)
            claims.append(Claim(f"{rule}-{policy}-{id_}", f"{what} {text}", value, *goal))
    return Result("endings", claims, seed, size, time.monotonic() - began, (), {"endings": table}).write(out)
