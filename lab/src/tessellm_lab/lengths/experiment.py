"""Length: trained at 16, read at up to 128, with positional schemes that can and cannot extrapolate.

The paper's statement is conditional: if the hypotheses hold at length N and each member does its task at N, so does the
composition. So it must inherit what its members have, scheme by scheme, length by length: no less, and no more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tessellm.rules import product

from ..common.claims import Claim, Result
from ..common.panels import COLOURS, FAINT, INK, caption, drawn, panels, save
from ..letters.positions import ALPHABET, NAMES, REPLACEMENTS, TASKS
from .members import LAG, SCHEMES, SHAPE, TRAINED_LENGTH, logits, target, train_members

LENGTHS = (4, 8, 12, 16, 20, 24, 32, 48, 64, 96, 128)
ABLE = 0.99  # letters right, from which a member does its task at a length
Table = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Effort:
    seeds: int
    steps: tuple[int, int]
    batch: int
    strings: int


SIZES = {"cpu": Effort(1, (600, 200), 32, 200), "full": Effort(5, (2000, 600), 64, 500)}


def run(seed: int, out: Path, size: str, log: Callable[[str], None] = print) -> Result:
    """Claims, `lengths.json` and `lengths.png` in `out`."""
    started, effort = time.perf_counter(), SIZES[size]
    generator = torch.Generator().manual_seed(seed)
    table: list[dict[str, Any]] = []
    for scheme in SCHEMES:
        log(f"{scheme} positions: training, then lengths {LENGTHS[0]} to {LENGTHS[-1]}")
        members = train_members(scheme, effort.seeds, effort.steps, effort.batch, generator)
        table += evaluate(scheme, members, effort.strings, generator)
    figures = drawn(lambda: draw(out, table))
    result = Result("lengths", claims(table), seed, size, time.perf_counter() - started, figures, {"lengths": table})
    result.write(out)
    return result


@torch.no_grad()
def evaluate(scheme: str, members: Any, strings: int, generator: torch.Generator) -> list[dict[str, Any]]:
    """For every length and seed: the share of letters, and of whole strings, that each model gets right."""
    count = len(members["norm"])
    table = []
    for length in LENGTHS:
        strings_BT = torch.randint(len(ALPHABET), (strings, length), generator=generator)
        logp_EBTV = logits(scheme, members, SHAPE, strings_BT.expand(count, -1, -1)).log_softmax(-1)
        for seed, logp_MBTV in enumerate(logp_EBTV.unflatten(0, (-1, len(REPLACEMENTS)))):
            right = [
                _right(law, strings_BT, task) for law, task in zip((*logp_MBTV, product(logp_MBTV)), TASKS, strict=True)
            ]
            row: dict[str, Any] = {"scheme": scheme, "length": length, "seed": seed}
            row |= {name: float(x.float().mean()) for name, x in zip(NAMES, right, strict=True)}
            row |= {f"{name}, strings": float(x.all(1).float().mean()) for name, x in zip(NAMES, right, strict=True)}
            table.append(row)
    return table


def _right(logp_BTV: Tensor, strings_BT: Tensor, task: tuple[dict[str, str], ...]) -> Tensor:
    return (logp_BTV.argmax(-1) == target(strings_BT, task))[:, LAG:]


def claims(table: Table) -> list[Claim]:
    able = [row for row in table if weakest(row) >= ABLE]
    short, degraded = (max(weakest(row) - row["composed"] for row in rows) for rows in (able, table))
    beyond = [row for row in table if row["length"] > TRAINED_LENGTH]
    more = max(row["composed"] - max(row[name] for name in NAMES[:-1]) for row in beyond)
    union = max(1 - sum(1 - row[name] for name in NAMES[:-1]) - row["composed"] for row in table)
    worst = {s: min(row["composed"] for row in beyond if row["scheme"] == s) for s in SCHEMES}
    members = {s: min(weakest(row) for row in beyond if row["scheme"] == s) for s in SCHEMES}
    found = {
        "inherits": (f"letters right, composed below the weakest member, where all members reach {ABLE}", short, 0.01),
        "no-more": ("letters right, composed above the strongest member, past the trained length", more, 0.05),
        "union": ("errors add and no worse: 1 − Σ of members' errors − composed", union, 0.01),
        "window": ("a sliding window extrapolates exactly: composed errors past 16", 1 - worst["window"], 0.01),
        "learned": ("learned positions do not: composed letters right at 128", worst["learned"], 0.5),
    }
    made = [
        Claim(name, f"{statement} (largest of all lengths)", round(value, 4), f"≤ {limit}", value <= limit)
        for name, (statement, value, limit) in found.items()
    ]
    schemes = [{s: round(x, 4) for s, x in values.items()} for values in (worst, members)]
    return [
        *made,
        Claim("degraded", "the same as `inherits`, where members fail, too: their errors add", round(degraded, 4)),
        Claim("extrapolation", "letters right at the worst length past 16: composed; weakest member", schemes),
    ]


def weakest(row: Mapping[str, Any]) -> float:
    return min(row[name] for name in NAMES[:-1])


def draw(out: Path, table: Table) -> str:
    figure, axes = panels(2, width=5.6)
    for ax, suffix, what in ((axes[0], "", "letters"), (axes[1], ", strings", "whole strings")):
        for colour, scheme in zip(COLOURS, SCHEMES, strict=False):
            rows = [[row for row in table if row["scheme"] == scheme and row["length"] == n] for n in LENGTHS]
            composed = [100 * min(row["composed" + suffix] for row in group) for group in rows]
            member = [100 * min(row[name + suffix] for row in group for name in NAMES[:-1]) for group in rows]
            ax.plot(LENGTHS, composed, "-", lw=2, color=colour, label=scheme)
            ax.plot(LENGTHS, member, "o", ms=5, mfc="none", color=colour)
        ax.axvline(TRAINED_LENGTH, color=FAINT, lw=1, ls="--")
        ax.plot([], [], "-", color=INK, label="composed")
        ax.plot([], [], "o", ms=5, mfc="none", color=INK, label="weakest member")
        ax.set(xscale="log", ylim=(0, 105), xticks=LENGTHS, xticklabels=[str(n) for n in LENGTHS])
        ax.minorticks_off()
        caption(ax, f"The composition inherits what its members have: {what}", "length", f"% of {what} right")
    axes[0].text(TRAINED_LENGTH * 0.96, 3, "trained at 16", fontsize=8, color=FAINT, ha="right")
    axes[1].legend(fontsize=8, frameon=False, loc="center right")
    return save(figure, out, "lengths")
