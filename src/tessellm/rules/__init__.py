"""Rules: how log-probabilities combine into one next-token law. Pure functions of tensors; imports torch alone."""

from .base import BaseRule, FunctionRule, first_member
from .complete import ComposedRule, RuleLike, make_rule
from .equation import (
    LARGEST_WEIGHT,
    LOG_FLOOR,
    member_counts,
    normalise,
    normalised,
    product,
    product_scores,
    tilt,
    working_dtype,
)
from .mixture import Mixture, MixtureState
from .product import Product
from .protocol import Explanation, Rule, Weights
from .table import DEFAULT, RULES, RuleEntry, default_termination, resolved

__all__ = [
    "DEFAULT",
    "LARGEST_WEIGHT",
    "LOG_FLOOR",
    "RULES",
    "BaseRule",
    "ComposedRule",
    "Explanation",
    "FunctionRule",
    "Mixture",
    "MixtureState",
    "Product",
    "Rule",
    "RuleEntry",
    "RuleLike",
    "Weights",
    "default_termination",
    "first_member",
    "make_rule",
    "member_counts",
    "normalise",
    "normalised",
    "product",
    "product_scores",
    "resolved",
    "tilt",
    "working_dtype",
]
