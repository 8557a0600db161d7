"""Sums of squared trigonometric functions of one angle: as trees, as tokens, as numbers, as exact algebra.

    2 ( sin² + cos² ) + 3 tan²        Sum((Term(2, Sum(…)), Term(3, "tan²")))
    ① 2 ( sin² + cos² ) ② 3 tan²      the same with its terms marked, as in the columns of a written sum

A term is a positive number times 1, a function or a sum in parentheses. A mark stands in place of a plus and says which
term of the line before this one came from. Knows nothing of proofs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

FUNCTIONS = ("sin²", "cos²", "tan²", "sec²", "cot²", "csc²")
LARGEST = 60
NUMBERS = tuple(str(n) for n in range(1, LARGEST + 1))
MARKS = tuple("①②③④⑤⑥⑦⑧⑨⑩⑪⑫")


@dataclass(frozen=True)
class Term:
    """`factor` times `body`: 1 (None), a function, or a sum in parentheses."""

    factor: int
    body: str | Sum | None = None
    mark: str | None = None

    @property
    def plain(self) -> bool:
        return not isinstance(self.body, Sum)


@dataclass(frozen=True)
class Sum:
    terms: tuple[Term, ...]


def sum_of(*terms: Term) -> Sum:
    return Sum(tuple(terms))


def marked(expression: Sum) -> Sum:
    """With its terms marked from the left."""
    pairs = zip(expression.terms, MARKS, strict=False)
    return Sum(tuple(replace(term, mark=mark) for term, mark in pairs))


def tokens(expression: Sum) -> list[str]:
    """A factor of 1 is written only where nothing else stands."""
    written: list[str] = []
    for number, term in enumerate(expression.terms):
        written += [term.mark] if term.mark else ["+"] if number else []
        written += [str(term.factor)] if term.factor != 1 or term.body is None else []
        if isinstance(term.body, Sum):
            written += ["(", *tokens(term.body), ")"]
        elif term.body is not None:
            written.append(term.body)
    return written


def text(expression: Sum) -> str:
    return " ".join(tokens(expression))


class ExpressionError(ValueError):
    """Tokens that are no sum of terms."""


def parse(words: Sequence[str]) -> Sum:
    """The tree of a sequence of tokens, all of it."""
    expression, end = _sum(words, 0)
    if end != len(words):
        raise ExpressionError(f"expected the end of the expression at token {end}; got {words[end]!r}")
    return expression


def _sum(words: Sequence[str], at: int) -> tuple[Sum, int]:
    term, at = _term(words, at)
    terms = [term]
    while at < len(words) and (words[at] == "+" or words[at] in MARKS):
        term, at = _term(words, at + (words[at] == "+"))
        terms.append(term)
    return Sum(tuple(terms)), at


def _term(words: Sequence[str], at: int) -> tuple[Term, int]:
    mark = words[at] if at < len(words) and words[at] in MARKS else None
    at += mark is not None
    factor, has_factor = 1, at < len(words) and words[at] in NUMBERS
    if has_factor:
        factor, at = int(words[at]), at + 1
    word = words[at] if at < len(words) else None
    if word in FUNCTIONS:
        return Term(factor, word, mark), at + 1
    if word == "(":
        body, at = _sum(words, at + 1)
        if at >= len(words) or words[at] != ")":
            raise ExpressionError(f"expected ')' at token {at}")
        return Term(factor, body, mark), at + 1
    if has_factor:
        return Term(factor, None, mark), at
    raise ExpressionError(f"expected a number, a function or '(' at token {at}; got {word!r}")


def value(expression: Sum, angle: float) -> float:
    """The number that the expression is at an angle."""
    sine, cosine = math.sin(angle) ** 2, math.cos(angle) ** 2
    numbers = (sine, cosine, sine / cosine, 1 / cosine, cosine / sine, 1 / sine)
    of = dict(zip(FUNCTIONS, numbers, strict=True))

    def total(expression: Sum) -> float:
        return sum(
            t.factor * (total(t.body) if isinstance(t.body, Sum) else of.get(t.body or "", 1.0))
            for t in expression.terms
        )

    return total(expression)


def algebra(expression: Sum) -> Any:
    """The expression in sympy, with sin² as the one unknown s: cos² = 1 − s, tan² = s/(1−s), …

    Equal rational functions of s are equal expressions, so cancelling their difference decides equality.
    """
    import sympy

    s = sympy.Symbol("s")
    of = dict(zip(FUNCTIONS, (s, 1 - s, s / (1 - s), 1 / (1 - s), (1 - s) / s, 1 / s), strict=True))

    def total(expression: Sum) -> Any:
        return sum(
            t.factor * (total(t.body) if isinstance(t.body, Sum) else of.get(t.body or "", 1)) for t in expression.terms
        )

    return total(expression)


@functools.lru_cache(maxsize=1 << 17)  # provers that are right write the same lines
def equal_symbolically(one: Sum, other: Sum) -> bool:
    import sympy

    return bool(sympy.cancel(algebra(one) - algebra(other)) == 0)


def equal_numerically(one: Sum, other: Sum, angles: Sequence[float] = (0.3, 0.71, 1.1, 2.5, 4.0)) -> bool:
    return all(math.isclose(value(one, a), value(other, a), rel_tol=1e-9, abs_tol=1e-9) for a in angles)


def skeleton(expression: Sum) -> str:
    """The expression with every number but 1 written N: what train and test problems must not share."""
    return " ".join("N" if word in NUMBERS and word != "1" else word for word in tokens(expression))
