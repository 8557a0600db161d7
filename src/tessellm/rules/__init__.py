"""Rules: how log-probabilities combine into one next-token distribution. Pure functions of tensors, of torch alone."""

from .base import BaseRule, Explained, Explanation, FunctionRule, Weights, first_member
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
from .table import DEFAULT, RULES, RuleEntry, find_rule, resolved, rule_names

__all__ = [
    "DEFAULT",
    "LARGEST_WEIGHT",
    "LOG_FLOOR",
    "RULES",
    "BaseRule",
    "ComposedRule",
    "Explained",
    "Explanation",
    "FunctionRule",
    "Mixture",
    "MixtureState",
    "Product",
    "RuleEntry",
    "RuleLike",
    "Weights",
    "find_rule",
    "first_member",
    "make_rule",
    "member_counts",
    "normalise",
    "normalised",
    "product",
    "product_scores",
    "resolved",
    "rule_names",
    "tilt",
    "working_dtype",
]
