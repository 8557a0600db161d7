"""What an experiment hands back: claims with their values and targets, and everything needed to run it again.

An experiment is a module with `run(seed, out, size, log) -> Result`; `size` is "cpu" (minutes, anyone) or "full" (one
GPU).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tessellm.files import write_text
from tessellm.provenance import environment


@dataclass(frozen=True)
class Claim:
    """Something that the experiment set out to show. Without a target it is a measurement: `holds` is None."""

    id: str
    statement: str
    value: Any
    target: str | None = None
    holds: bool | None = None


def shown(value: Any) -> str:
    """A value as a reader wants it: numbers to four digits, lists and tables in a line."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {shown(item)}" for key, item in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(shown, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def at_least(id: str, statement: str, value: float, bound: float) -> Claim:
    return Claim(id, statement, value, f"≥ {bound:g}", value >= bound)


def at_most(id: str, statement: str, value: float, bound: float) -> Claim:
    return Claim(id, statement, value, f"≤ {bound:g}", value <= bound)


@dataclass(frozen=True)
class Result:
    """One run of one experiment."""

    name: str
    claims: Sequence[Claim]
    seed: int
    size: str
    seconds: float
    figures: Sequence[str] = ()
    tables: Mapping[str, Any] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        return all(claim.holds is not False for claim in self.claims)

    def write(self, out: Path, measured_on: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """NAME.json in `out`, with what it was measured on: this machine, if not told otherwise."""
        content = {**asdict(self), **(measured_on or environment())}
        write_text(out / f"{self.name}.json", json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        return content
