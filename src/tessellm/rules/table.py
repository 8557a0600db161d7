"""The table of rules: each by name, with what makes it. Other distributions add rows by entry points."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points

from .base import BaseRule
from .mixture import Mixture
from .product import Product


@dataclass(frozen=True)
class RuleEntry:
    """A row of the rule table: what makes a rule, what it is, where it comes from."""

    make: Callable[..., BaseRule]
    summary: str
    reference: str


GROUP = "tessellm.rules"  # of entry points, each of which names a RuleEntry
OF_THE_LAB = ("evidence",)
DEFAULT = "auto"  # the rule mixture; product where every expert is a style
RULES: dict[str, RuleEntry] = {  # that engines run
    "mixture": RuleEntry(
        Mixture,
        "a mixture of the base, the active experts and Eq. 2 of them; the prior is the router's",
        "help(tessellm.rules.components); Eq. 2 of arXiv 2605.28304 is one of its components",
    ),
    "product": RuleEntry(Product, "add log-probabilities, subtract the base's k−1 times", "arXiv 2605.28304, Eq. 2"),
}


def rule_names() -> list[str]:
    """Return the names of all rules that are installed, the library's own first."""
    return [*RULES, *sorted(entry_points(group=GROUP).names - RULES.keys())]


def find_rule(name: str) -> RuleEntry | None:
    """Return the row of a rule; None: there is none of that name."""
    if name in RULES:
        return RULES[name]
    found = entry_points(group=GROUP, name=name)
    if not found and name in OF_THE_LAB:
        raise ValueError(f"the rule {name!r} belongs to the lab, which is not installed. In a clone: pip install ./lab")
    entry: RuleEntry | None = next(iter(found)).load() if found else None
    return entry


def resolved(name: str) -> str:
    """Return the rule that a name stands for."""
    return Mixture.name if name == DEFAULT else name
