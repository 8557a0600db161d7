"""The table of rules: each by name, with what makes it. complete.py adds weights and stopping."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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


WITHOUT_CHAT = "evidence"
DEFAULT = "auto"  # belief for several experts of a chat model, else WITHOUT_CHAT: a model decides, and it has that rule
RULES: dict[str, RuleEntry] = {
    "belief": RuleEntry(
        Belief,
        "a mixture of the base, the experts and Eq. 2, believed from the prompt and from what was written",
        "help(tessellm.rules.belief); Eq. 2 of arXiv 2605.28304 is one of its laws",
    ),
    "evidence": RuleEntry(
        Evidence,
        "Eq. 2 while the members are compatible, else the owner that the evidence singles out",
        "help(tessellm.rules.evidence); equals arXiv 2605.28304, Eq. 2 where its theory holds",
        termination="owner",
    ),
    "product": RuleEntry(Product, "add log-probabilities, subtract the base's k−1 times", "arXiv 2605.28304, Eq. 2"),
}


def without_model(name: str) -> str:
    """The rule that a name stands for where no model is there to choose the default."""
    return WITHOUT_CHAT if name == DEFAULT else name


def default_termination(name: str) -> str:
    """Who may stop, where the user does not say."""
    name = without_model(name)
    return RULES[name].termination if name in RULES else "rule"
