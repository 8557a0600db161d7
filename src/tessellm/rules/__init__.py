"""Rules: how log-probabilities combine into one next-token law. Pure functions of tensors; imports torch alone."""

from .product import (
    LARGEST_WEIGHT,
    LOG_FLOOR,
    Product,
    Weighted,
    member_counts,
    normalise,
    normalised,
    product,
    product_scores,
    tilt,
    working_dtype,
)
from .protocol import Rule
from .table import DEFAULT, RULES, RuleEntry, default_termination, describe_rule, make_rule, plain_rule, with_weights

__all__ = [
    "DEFAULT",
    "LARGEST_WEIGHT",
    "LOG_FLOOR",
    "RULES",
    "Product",
    "Rule",
    "RuleEntry",
    "Weighted",
    "default_termination",
    "describe_rule",
    "make_rule",
    "member_counts",
    "normalise",
    "normalised",
    "plain_rule",
    "product",
    "product_scores",
    "tilt",
    "with_weights",
    "working_dtype",
]
