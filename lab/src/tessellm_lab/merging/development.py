"""How strong a merge is, chosen on development problems: the strength with the best mean score over all tasks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from tessellm.files import write_text
from tessellm.model import ComposedForCausalLM

from .merged import Merged
from .merges import METHODS

Scores = Mapping[str, float]  # by task


@dataclass(frozen=True)
class StrengthChoice:
    """A merge's strength, and what every strength that was tried scored on the development problems."""

    method: str
    parameter: str | None  # λ, as mergekit calls it
    chosen: float | None
    tried: dict[str, Scores]  # by strength; empty where there was nothing to choose

    def __str__(self) -> str:
        if self.chosen is None:
            return f"{self.method} has no strength to choose"
        among = f", chosen among {', '.join(self.tried)}" if self.tried else ", as given"
        return f"{self.method}: {self.parameter} = {self.chosen:g}{among}"


def strengths_of(method: str, given: Sequence[float] | None) -> tuple[float, ...]:
    """Those to try."""
    how = METHODS[method]
    return tuple(given) if given and how.strength is not None else how.strengths


def choose(
    merged: Merged,
    method: str,
    strengths: Sequence[float],
    score: Callable[[ComposedForCausalLM, str, Path], Scores],
    folder: Path,
) -> StrengthChoice:
    """Try every strength; among equals, the nearest to the usual. What was scored is kept in the folder."""
    how = METHODS[method]
    if len(strengths) < 2:
        return StrengthChoice(method, how.strength, strengths[0] if strengths else None, {})
    found: dict[float, Scores] = {}
    for strength in strengths:
        name = f"{strength:g}"
        path = folder / method / f"{name}.json"
        if not path.is_file():
            with merged.for_once(method, strength) as model:
                scores = score(model, f"{method} {how.strength}={name}", folder / method / name)
            write_text(path, json.dumps(scores, indent=2) + "\n")
        found[strength] = json.loads(path.read_text(encoding="utf-8"))
    best = max(found, key=lambda strength: (fmean(found[strength].values()), -abs(strength - how.default)))
    return StrengthChoice(method, how.strength, best, {f"{strength:g}": scores for strength, scores in found.items()})
