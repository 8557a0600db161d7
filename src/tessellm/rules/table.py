"""The table of rules: each by name, with what makes it. complete.py adds weights and stopping."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .evidence import Evidence
from .mixture import Mixture
from .product import Product
from .protocol import Rule


@dataclass(frozen=True)
class RuleEntry:
    """A row of the rule table: what it is called, what makes it, what it is, where it comes from."""

    make: Callable[..., Rule]
    summary: str
    reference: str
    termination: str = "rule"  # who may stop, where the user does not say


DEFAULT = "auto"  # the rule mixture; product where every expert is a style
RULES: dict[str, RuleEntry] = {
    "mixture": RuleEntry(
        Mixture,
        "a mixture of the base, the active experts and Eq. 2 of them; the prior is the router's",
        "help(tessellm.rules.components); Eq. 2 of arXiv 2605.28304 is one of its components",
    ),
    "evidence": RuleEntry(
        Evidence,
        "Eq. 2 while the members are compatible, else the owner that the evidence singles out",
        "help(tessellm.rules.evidence); equals arXiv 2605.28304, Eq. 2 where its theory holds",
        termination="owner",
    ),
    "product": RuleEntry(Product, "add log-probabilities, subtract the base's k−1 times", "arXiv 2605.28304, Eq. 2"),
}


def resolved(name: str) -> str:
    """Return the rule that a name stands for."""
    return Mixture.name if name == DEFAULT else name


def default_termination(name: str) -> str:
    """Who may stop, where the user does not say."""
    name = resolved(name)
    return RULES[name].termination if name in RULES else "rule"
