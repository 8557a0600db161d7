"""The table of rules: each by name, with what makes it. complete.py adds weights and stopping."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from . import gates
from .belief import Belief
from .evidence import Evidence
from .product import Product
from .protocol import Rule


@dataclass(frozen=True)
class RuleEntry:
    """A row of the rule table: what it is called, what makes it, what it is, where it comes from."""

    make: Callable[..., Rule]
    summary: str
    reference: str
    termination: str = "rule"  # who may stop, where the user does not say


DEFAULT = "evidence"
RULES: dict[str, RuleEntry] = {
    "evidence": RuleEntry(
        Evidence,
        "Eq. 2 while the members are compatible, else the owner that the evidence singles out",
        "help(tessellm.rules.evidence); equals arXiv 2605.28304, Eq. 2 where its theory holds",
        termination="owner",
    ),
    "belief": RuleEntry(
        Belief,
        "a mixture of the base, the experts and Eq. 2, believed from the prompt and from what was written",
        "help(tessellm.rules.belief)",
    ),
    "product": RuleEntry(Product, "add log-probabilities, subtract the base's k−1 times", "arXiv 2605.28304, Eq. 2"),
    "owner": RuleEntry(gates.Owner, "the most divergent expert speaks alone", "help(tessellm.rules.gates)"),
    "relative-gate": RuleEntry(
        gates.RelativeGate,
        "Eq. 2 over the experts that diverge by a share of the largest divergence",
        "help(tessellm.rules.gates)",
    ),
    "tail-floor": RuleEntry(
        gates.TailFloor, "Eq. 2 without the tails of all experts but the most divergent", "help(tessellm.rules.gates)"
    ),
    "plausibility": RuleEntry(
        gates.Plausibility, "Eq. 2 on the tokens that an expert finds plausible", "after arXiv 2210.15097"
    ),
}


def default_termination(name: str) -> str:
    """Who may stop, where the user does not say."""
    return RULES[name].termination if name in RULES else "rule"
