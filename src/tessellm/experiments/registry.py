"""Every experiment by name, and how to run one. A module has `run(seed, out, size)` and hands back a Result."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import TessellmError, nearest
from .claims import Result

SIZES = ("cpu", "full")


@dataclass(frozen=True)
class Experiment:
    module: str
    summary: str


EXPERIMENTS = {
    "many-experts": Experiment(
        "many_experts", "letters with 1 to 13 experts: where Eq. 2 collapses, and what does not"
    ),
    "skills": Experiment("skills", "chains of skills, each by its own expert, in four training regimes"),
}


def run_experiment(name: str, seed: int, out: Path, size: str) -> dict[str, Any]:
    """Run one experiment; NAME.json and its figures are in `out` afterwards. Hands back what NAME.json holds."""
    if name not in EXPERIMENTS:
        raise TessellmError(f"unknown experiment {name!r}; {nearest(name, EXPERIMENTS)}")
    if size not in SIZES:
        raise TessellmError(f"unknown size {size!r}; expected one of {', '.join(SIZES)}")
    module: Any = importlib.import_module(f"{__package__}.{EXPERIMENTS[name].module}")
    out.mkdir(parents=True, exist_ok=True)
    made = module.run(seed, out, size)
    return made.write(out) if isinstance(made, Result) else made
