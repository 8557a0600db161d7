"""The table of rules: made by name, weighted, described as a config holds them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from . import gates
from .evidence import Evidence
from .product import Product, Weighted
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


def make_rule(name: str, weights: Sequence[float] | None = None, **parameters: Any) -> Rule:
    """A rule of the table, by name, with its parameters and the experts' weights."""
    if name not in RULES:
        raise ValueError(f"unknown rule {name!r}; known: {', '.join(RULES)}")
    return with_weights(RULES[name].make(**parameters), weights)


def default_termination(name: str) -> str:
    """Who may stop, where the user does not say."""
    return RULES[name].termination if name in RULES else "rule"


def with_weights(rule: Rule, weights: Sequence[float] | None) -> Rule:
    """The same rule over weighted experts."""
    if weights is None or all(weight == 1 for weight in weights):
        return rule
    numbers = tuple(float(weight) for weight in weights)
    return Product(numbers) if isinstance(rule, Product) else Weighted(rule, numbers)


def describe_rule(rule: Rule) -> dict[str, Any]:
    """A rule's name and those of its parameters that are not the default, as a config holds them."""
    entry: dict[str, Any] = {"name": rule.name}
    for field in fields(rule) if is_dataclass(rule) else ():  # type: ignore[var-annotated]
        if field.init and field.name not in ("name", "weights") and getattr(rule, field.name) != field.default:
            entry[field.name] = getattr(rule, field.name)
    return entry


def plain_rule(rule: str | Mapping[str, Any] | Rule) -> tuple[Rule, Sequence[float] | None]:
    """A rule object without weights, and the weights that it came with: those are the experts'."""
    if isinstance(rule, str):
        rule = {"name": rule}
    if isinstance(rule, Mapping):
        rule = make_rule(rule["name"], **{key: value for key, value in rule.items() if key != "name"})
    if isinstance(rule, Weighted):
        return rule.rule, rule.weights
    if isinstance(rule, Product):
        return Product(), rule.weights
    return rule, None
