"""Scores as cells with intervals, and what they show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tessellm.evaluate.intervals import bootstrap, compare

from ..common.claims import Claim, at_least
from ..merging.merges import METHODS
from .members import EXPERTS
from .models import COMPOSED, EQ2, LORA
from .problems import KINDS
from .scoring import Scores
from .writing import Sample

SINGLE = ("base", *EXPERTS)


@dataclass(frozen=True)
class Pooled:
    """All seeds' problems together, in one order for every column."""

    columns: list[str]
    scores: dict[str, dict[str, list[float]]]  # by kind, then column
    seeds: int
    tokens: dict[str, dict[str, float]]  # written a problem
    went_on: dict[str, dict[str, float]]  # share that only the limit of tokens ended

    def mean(self, kind: str, column: str) -> float:
        return float(np.mean(self.scores[kind][column]))

    def average(self, column: str) -> float:
        """Of the kinds' means."""
        return sum(self.mean(kind, column) for kind in KINDS) / len(KINDS)

    def best(self, names: Sequence[str], kind: str) -> str:
        return max(names, key=lambda name: self.mean(kind, name))


def pooled(parts: Sequence[tuple[Sequence[Sample], Scores]]) -> Pooled:
    columns = list(dict.fromkeys(sample.column for samples, _ in parts for sample in samples))
    every = [sample for samples, _ in parts for sample in samples]

    def mean(kind: str, column: str, of: Any) -> float:
        return float(np.mean([of(sample) for sample in every if (sample.kind, sample.column) == (kind, column)]))

    def by_column(of: Any) -> dict[str, dict[str, float]]:
        return {kind: {column: mean(kind, column, of) for column in columns} for kind in KINDS}

    scores = {
        kind: {column: [score for _, scores in parts for score in scores[kind, column]] for column in columns}
        for kind in KINDS
    }
    ended = by_column(lambda sample: sample.finish_reason == "length")
    return Pooled(columns, scores, len(parts), by_column(lambda sample: sample.tokens), ended)


def table_of(found: Pooled) -> dict[str, Any]:
    """Cells by kind and column: mean, interval, each seed's mean; how much better the composition is on the same
    problems."""
    return {kind: {column: _cell(found, kind, column) for column in found.columns} for kind in KINDS}


def _cell(found: Pooled, kind: str, column: str) -> dict[str, Any]:
    scores = found.scores[kind][column]
    interval = bootstrap(scores)
    cell: dict[str, Any] = {
        "mean": interval.mean,
        "low": interval.low,
        "high": interval.high,
        "problems": len(scores),
        "seeds": [float(np.mean(part)) for part in np.array_split(scores, found.seeds)],
        "tokens": found.tokens[kind][column],
        "went on": found.went_on[kind][column],
    }
    if column != COMPOSED:
        gain = compare(found.scores[kind][COMPOSED], scores)
        cell["composed better by"] = [gain.interval.mean, gain.interval.low, gain.interval.high]
        cell["p"] = gain.p
    return cell


def quality_claims(found: Pooled) -> list[Claim]:
    """What the table is to show."""
    made = [*kept_claims(found, COMPOSED, SINGLE, ""), *kept_claims(found, LORA + COMPOSED, _lora(), LORA)]
    merge = max(METHODS, key=found.average)
    gain = found.average(COMPOSED) - found.average(merge)
    statement = f"average of the three kinds: composed, less that of the best merge ({merge})"
    made.append(Claim("average", statement, gain, "> 0", gain > 0))
    for id, names, what in (("members", SINGLE, "single member"), ("merges", list(METHODS), "merge")):
        best = found.best(names, "mixed")
        least = min(
            compare(found.scores["mixed"][COMPOSED], found.scores["mixed"][name]).interval.low for name in names
        )
        statement = f"mixed problems: composed above every {what}, the least of the intervals' ends (best: {best})"
        made.append(Claim(f"mixed-{id}", statement, least, "> 0", least > 0))
    made.append(
        Claim("mixed", "mixed problems: share right, composed by the default rule", found.mean("mixed", COMPOSED))
    )
    made.append(Claim("mixed-eq2", "the same, composed by Eq. 2", found.mean("mixed", EQ2)))
    made.append(Claim("mixed-lora", "the same, LoRA experts by the default rule", found.mean("mixed", LORA + COMPOSED)))
    return made


def _lora() -> list[str]:
    return ["base", *(LORA + name for name in EXPERTS)]


def kept_claims(found: Pooled, column: str, members: Sequence[str], prefix: str) -> list[Claim]:
    """How much of the better expert's score on its own domain the composition keeps."""
    made = []
    for kind in ("math", "code"):
        best = found.best(members, kind)
        kept = found.mean(kind, column) / max(found.mean(kind, best), 1e-9)
        id = f"{prefix.strip().lower()}-{kind}".removeprefix("-")
        made.append(at_least(id, f"{kind} problems: {column}, as a share of the better expert ({best})", kept, 0.95))
    return made


def speed_claim(facts: Sequence[Mapping[str, Any]], firm: bool) -> Claim:
    """Tokens a second by the engine, starting it included, over those of a notebook's loop, both by Eq. 2; the slowest
    seed."""
    ratios = []
    for each in facts:
        engine, loop = each["pace"][EQ2], each["pace"]["a notebook's loop"]
        ratios.append(engine["tokens"] / engine["seconds"] / (loop["tokens"] / loop["seconds"]))
    statement = "evaluating the composition: the engine over a notebook's loop, tokens a second, slowest seed"
    made = at_least("speed", statement, min(ratios), 5.0)
    return made if firm else Claim(made.id, made.statement, made.value)
