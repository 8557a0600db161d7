"""Letters with one to thirteen experts: perfectly disjoint skills, nothing to stop, and yet Eq. 2 dies.

Position-wise, as in the paper: 27 characters, position t's output is the transformed character t. The base copies;
expert i replaces one letter by another, thirteen disjoint replacements in all. Every member is a GPT-2 trained from
scratch on 2,000 strings of 16 characters, six times over; the composition must apply all replacements at once, at
every length from 8 to 31. |log Z| of Eq. 2 announces its collapse.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tessellm.rules import product_scores

from ..common.claims import Claim, Result
from ..common.devices import device_for
from ..common.gates import GATES
from ..common.intervals import share
from ..common.panels import blank, drawn, save
from ..common.stacked import Params, Shape, select, train
from ..common.stacked_gpt2 import initialise_gpt2, logits_gpt2
from ..skills.baselines import DECODING
from ..skills.experiment import default_rule

CHARACTERS, EXPERTS, TRAINED_LENGTH = 27, 13, 16
LENGTHS = (8, 12, 16, 20, 24, 28, 31)
SHAPE = Shape(vocabulary=CHARACTERS, width=64, layers=2, heads=2, context=32)
STRINGS = 2000


@dataclass(frozen=True)
class Schedule:
    """How each member passes over its strings."""

    epochs: int
    rows: int  # strings an update
    rate: float
    constant: bool = True


SCHEDULE = Schedule(epochs=6, rows=20, rate=3e-3, constant=False)
LONG = replace(SCHEDULE, epochs=60)  # tails converge further: how much of the collapse is left?


def replacements(generator: torch.Generator) -> Tensor:
    """Thirteen disjoint pairs (from, to) of the 26 letters; the space stays: [13, 2]."""
    return torch.randperm(CHARACTERS - 1, generator=generator, device=generator.device).view(EXPERTS, 2)


def target(strings: Tensor, pairs: Tensor) -> Tensor:
    """All of the replacements applied, one pass: sources and targets are disjoint."""
    table = torch.arange(CHARACTERS, device=strings.device)
    table[pairs[:, 0]] = pairs[:, 1]
    return table[strings]


def train_letters(
    seeds: list[int], schedule: Schedule, device: str, log: Callable[[str], None]
) -> tuple[Params, Tensor]:
    """Members of all seeds, seed-major (base first), and each seed's replacements [S, 13, 2]."""
    generator = torch.Generator(device=device).manual_seed(seeds[0])
    pairs = torch.stack([replacements(generator) for _ in seeds])
    members = len(seeds) * (EXPERTS + 1)
    strings = torch.randint(CHARACTERS, (members, STRINGS, TRAINED_LENGTH), generator=generator, device=device)
    wanted = strings.clone()
    for s in range(len(seeds)):
        for e in range(EXPERTS):
            index = s * (EXPERTS + 1) + 1 + e
            wanted[index] = target(strings[index], pairs[s, e : e + 1])
    order = torch.cat([torch.randperm(STRINGS, generator=generator, device=device) for _ in range(schedule.epochs)])
    mask = torch.ones(members, schedule.rows, TRAINED_LENGTH, device=device)
    updates = order.split(schedule.rows)
    step = iter(updates)

    def batch() -> tuple[Tensor, Tensor, Tensor]:
        at = next(step)
        return strings[:, at], wanted[:, at], mask

    def report(step: int, loss: Tensor) -> None:
        if step % 1000 == 999 or step == len(updates) - 1:
            log(f"update {step + 1}: mean loss {loss.mean():.2g}, worst {loss.max():.2g}")

    start = initialise_gpt2(SHAPE, members, generator)
    noisy = partial(logits_gpt2, training=True)
    params = train(start, SHAPE, batch, len(updates), schedule.rate, report, forward=noisy, constant=schedule.constant)
    return params, pairs


RULES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    name: lambda logp, tokens, rule=rule: rule(logp) for name, rule in (DECODING | GATES).items()
} | {"evidence": default_rule}


@torch.no_grad()
def measure(params: Params, pairs: Tensor, strings: int, log: Callable[[str], None]) -> list[dict[str, Any]]:
    """Share of unseen strings composed exactly, for every number of experts and length, pooled over seeds."""
    device, seeds = pairs.device, len(pairs)
    cells: dict[tuple[int, int], dict[str, int]] = {}
    interference: dict[tuple[int, int], list[Tensor]] = {}
    for s in range(seeds):
        members = select(params, list(range(s * (EXPERTS + 1), (s + 1) * (EXPERTS + 1))))
        for length in LENGTHS:
            generator = torch.Generator(device=device).manual_seed(1000 * s + length)
            text = torch.randint(CHARACTERS, (strings, length), generator=generator, device=device)
            every = logits_gpt2(members, SHAPE, text[None].expand(EXPERTS + 1, -1, -1)).log_softmax(-1)
            for experts in range(1, EXPERTS + 1):
                logp, wanted = every[: experts + 1], target(text, pairs[s, :experts])
                cell = cells.setdefault((experts, length), dict.fromkeys(RULES, 0))
                for name, rule in RULES.items():
                    cell[name] += int((rule(logp, text).argmax(-1) == wanted).all(1).sum())
                log_z = product_scores(logp).logsumexp(-1).abs()
                interference.setdefault((experts, length), []).append(log_z.flatten())
            log(f"seed {s}, length {length}: {EXPERTS} experts, evidence {cell['evidence']}, Eq. 2 {cell['eq2']}")
    rows = []
    for (experts, length), cell in cells.items():
        log_z = torch.cat(interference[experts, length])
        shares = {name: share(right, strings * seeds) for name, right in cell.items()}
        rows.append(
            {"experts": experts, "length": length, "rules": shares,
             "log_z": {"mean": round(log_z.mean().item(), 4), "max": round(log_z.max().item(), 4)}}
        )  # fmt: skip
    return rows


def claims_of(table: list[dict[str, Any]], longer: list[dict[str, Any]] | None = None) -> list[Claim]:
    """Targets are for the members as usually trained; longer training shows how far the collapse depends on it."""
    worst = min(c["rules"]["evidence"]["share"] for c in table)
    most = [c["rules"] for c in table if c["experts"] == EXPERTS]
    at_13 = min(c["evidence"]["share"] for c in most)
    collapse = max(c["eq2"]["share"] for c in most)
    few = min(c["rules"]["eq2"]["share"] for c in table if c["experts"] <= 2)
    claims = [
        Claim(
            "thirteen", "13 experts, lengths 8 to 31: worst share right, default rule", at_13, "≥ 0.99", at_13 >= 0.99
        ),
        Claim(
            "any", "1 to 13 experts, lengths 8 to 31: worst share right, default rule", worst, "≥ 0.99", worst >= 0.99
        ),
        Claim("collapse", "13 experts: best share right of Eq. 2 at any length", collapse, "≤ 0.01", collapse <= 0.01),
        Claim("few", "1 and 2 experts: worst share right of Eq. 2", few),
    ]
    for rule, name in {"evidence": "default rule", "eq2": "Eq. 2"}.items() if longer else ():
        value = min(c["rules"][rule]["share"] for c in longer or () if c["experts"] == EXPERTS)
        text = f"13 experts trained ten times as long: worst share right at any length, {name}"
        claims.append(Claim(f"longer-{rule}", text, value))
    return claims


def run(seed: int, out: Path, size: str, log: Callable[[str], None] = print) -> dict[str, Any]:
    """Train, measure, write `many-experts.json` and `many-experts.png`."""
    began = time.monotonic()
    full, device = size == "full", device_for(size)
    seeds = [seed, seed + 1, seed + 2] if full else [seed]
    tables = {}
    for name, schedule in {"letters": SCHEDULE, "longer": LONG if full else None}.items():
        if schedule is not None:
            params, pairs = train_letters(seeds, schedule, device, log)
            tables[name] = measure(params, pairs, 2000 if full else 200, log)
    claims = claims_of(tables["letters"], tables.get("longer"))
    content = Result("many-experts", claims, seed, size, time.monotonic() - began, tables=tables).write(out)
    figures = drawn(lambda: draw(content, out))
    return Result("many-experts", claims, seed, size, time.monotonic() - began, figures, tables).write(out)


def draw(content: dict[str, Any], out: Path) -> str:
    """Share right and interference by number of experts."""
    table = content["tables"]["letters"]
    figure = blank(9, 3.2, layout="constrained")
    left, right = figure.subplots(1, 2)
    for length, style in ((TRAINED_LENGTH, "-"), (LENGTHS[-1], "--")):
        cells = [c for c in table if c["length"] == length]
        counts = [c["experts"] for c in cells]
        for name, colour in (("eq2", "C3"), ("geometric-mean", "C4"), ("owner", "C1"), ("evidence", "C0")):
            left.plot(
                counts, [c["rules"][name]["share"] for c in cells], colour + style, label=f"{name}, length {length}"
            )
        right.plot(counts, [c["log_z"]["mean"] for c in cells], "C3" + style, label=f"mean, length {length}")
        right.plot(counts, [c["log_z"]["max"] for c in cells], "C5" + style, label=f"max, length {length}")
    left.set(xlabel="experts", ylabel="strings exactly right", title="Disjoint letter replacements")
    right.set(xlabel="experts", ylabel="|log Z| of Eq. 2 (nats)", title="Interference", yscale="log")
    left.legend(fontsize=6)
    right.legend(fontsize=7)
    figure.suptitle(f"{content['hardware']}, seed {content['seed']}", fontsize=8)
    figure.set_dpi(130)
    return save(figure, out, "many-experts")
