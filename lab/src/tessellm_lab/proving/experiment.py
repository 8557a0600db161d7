"""`reproduce routing`: how well prompts of twenty skills reach the right adapter, ours beside other routers.

The base reads every prompt once; what it says is kept in OUT/readings, so that a stopped run goes on.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..common.claims import Result
from ..common.panels import drawn
from .claims import claims_of
from .columns import DESCRIPTION, NOTHING, OURS, Column, Subject, example_columns, own_columns, peer_columns
from .decisions import cells, confusions, errors, right_at, share, threshold_for
from .ground import Ground
from .likelihood import by_likelihood
from .reading import Reading, Readings
from .skills import BASE, TWENTY, Asked, Places, conversations, development_prompts, ordinary_prompts, skill_prompts

Log = Callable[[str], None]
SHOWN = 40  # prompts that went to the wrong member
FEW = 40  # plain prompts, and near ones, that every expert reads


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    prompts: int  # per skill and wording
    counts: tuple[int, ...] = (1, 8)  # examples
    expert_data: int = 8  # prompts per expert that SEQR is calibrated on
    sets: tuple[tuple[int, int], ...] = ((5, 20), (10, 10))  # experts, and how many random sets of so many
    likelihood: int = 2  # prompts per skill and wording that every expert reads, for the router by likelihood
    completion: int = 5  # prompts per skill and wording that are read without the template
    names: tuple[str, ...] = TWENTY
    calibration: int | None = None  # calibration prompts at most


PLANS = {"cpu": Plan(10), "full": Plan(60, (1, 4, 8, 32))}


def run(seed: int, out: Path, size: str, log: Log = print) -> Result:
    """Return claims and tables; pictures in `out`."""
    return measure(Places.found(), PLANS[size], seed, out, size, log)


def measure(places: Places, plan: Plan, seed: int, out: Path, size: str, log: Log = print) -> Result:
    """Return the same with places and a plan of the caller's."""
    since = time.monotonic()
    ground = Ground(places, plan.names, log=log, most_calibration=plan.calibration)
    kept = ground.readings(out)
    single = [*skill_prompts(places, plan.names, plan.prompts), *ordinary_prompts(places)]
    asked = [*single, *_conversations(places, plan)]
    subject = Subject.of(ground, kept, asked, places, max(plan.counts))
    expert_data = _expert_data(ground, kept, places, plan.expert_data)
    columns = [
        *own_columns(subject),
        *example_columns(subject.first(len(single)), plan.counts),
        *peer_columns(subject, plan.counts, expert_data),
    ]
    table, mistakes = {}, {}
    for column in columns:
        decisions = column.decide()
        table[column.name] = {**_about(column), **cells(decisions, asked[: len(decisions)], seed)}
        log(f"{time.monotonic() - since:.0f} s: {column.name}: {_line(table[column.name])}")
        if column.family == OURS and column.given in (NOTHING, DESCRIPTION):
            threshold = table[column.name]["threshold"]
            mistakes[column.name] = {
                "confusions": confusions(decisions, asked, threshold),
                "prompts": errors(decisions, asked, threshold, SHOWN),
            }
    if plan.likelihood:
        few = [*skill_prompts(places, plan.names, plan.likelihood), *_few_ordinary(places, FEW)]
        decisions = by_likelihood(ground, ground.rows(few), out, log)
        column = Column("prompt likelihood", NOTHING, list)
        table[column.name] = {**_about(column), **cells(decisions, few, seed)}
    sets = {str(count): _random_sets(subject, single, count, draws, seed) for count, draws in plan.sets}
    without = _completion(places, plan, out, seed, log) if plan.completion else {}
    tables = {"twenty": table, "sets": sets, "without a template": without, "mistakes": mistakes}
    figures = drawn(lambda: _draw(tables, out))
    return Result("routing", claims_of(tables), seed, size, time.monotonic() - since, figures, tables)


def _conversations(places: Places, plan: Plan) -> list[Asked]:
    return [asked for asked in conversations(places) if asked.expected in (BASE, *plan.names)]


def _few_ordinary(places: Places, count: int) -> list[Asked]:
    every = ordinary_prompts(places)
    return [each for cell in ("plain", "near") for each in [asked for asked in every if asked.cell == cell][:count]]


def _expert_data(ground: Ground, kept: Readings, places: Places, count: int) -> dict[str, list[Reading]]:
    """Return readings of some prompts of each expert's own."""
    own = [
        Asked("dev", name, (("user", text),))
        for name in ground.names
        for text in development_prompts(places, name, count)
    ]
    found: dict[str, list[Reading]] = {}
    for asked, reading in zip(own, kept.of(ground.rows(own)), strict=True):
        found.setdefault(asked.expected, []).append(reading)
    return found


def _random_sets(subject: Subject, asked: Sequence[Asked], count: int, draws: int, seed: int) -> dict[str, Any]:
    """Return the shares that are right, by column, over random sets of so many experts."""
    every = subject.ground.names
    draw = random.Random(seed)
    rights: dict[str, dict[str, list[float]]] = {}
    for _ in range(draws if count < len(every) else 0):
        names = tuple(sorted(draw.sample(every, count), key=every.index))
        places = [n for n, each in enumerate(asked) if each.expected in (BASE, *names)]
        part = Subject(subject.ground, [subject.readings[n] for n in places], [], subject.described, subject.examples)
        here = [asked[n] for n in places]
        for column in own_columns(part, names):
            decisions = column.decide()
            threshold = threshold_for(decisions, here)
            for cell in dict.fromkeys(each.cell for each in here):
                right = [right_at(d, a, threshold) for d, a in zip(decisions, here, strict=True) if a.cell == cell]
                rights.setdefault(column.name, {}).setdefault(cell, []).append(float(np.mean(right)))
    return {name: {cell: share(means, seed) for cell, means in found.items()} for name, found in rights.items()}


def _completion(places: Places, plan: Plan, out: Path, seed: int, log: Log) -> Mapping[str, Any]:
    """Return the shares of a base without a chat template: the prompt alone is read."""
    ground = Ground(places, plan.names, False, log, plan.calibration)
    asked = [*skill_prompts(places, plan.names, plan.completion), *ordinary_prompts(places)]
    subject = Subject.of(ground, ground.readings(out), asked, places, 0)
    return {column.name: {**_about(column), **cells(column.decide(), asked, seed)} for column in own_columns(subject)}


def _about(column: Column) -> dict[str, Any]:
    return {"family": column.family, "given": column.given, "embedder": column.embedder, "examples": column.examples}


def _line(entry: Mapping[str, Any]) -> str:
    return ", ".join(f"{cell} {found['share']:.3f}" for cell, found in entry["cells"].items())


def _draw(tables: Mapping[str, Any], out: Path) -> str:
    from .figure import draw

    return draw(tables, out)
