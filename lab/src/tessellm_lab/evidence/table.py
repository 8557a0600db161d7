"""The row of tessellm's table of rules by which compositions find `evidence`: pyproject.toml registers it."""

from __future__ import annotations

from tessellm.rules import RuleEntry

from .rule import INTERFERENCE, TRUST, WINDOW, Evidence
from .termination import Stopping

OWNER = "owner"


def make(
    window: int = WINDOW, trust: float = TRUST, interference: float = INTERFERENCE, termination: str = OWNER
) -> Stopping:
    """Make the rule as compositions run it; `termination`: who may stop (see termination.py)."""
    return Stopping(Evidence(window, trust, interference), termination, default=OWNER)


ENTRY = RuleEntry(
    make,
    "Eq. 2 while the members are compatible, else the owner that the evidence singles out",
    "help(tessellm_lab.evidence.rule); equals arXiv 2605.28304, Eq. 2 where its theory holds",
)
