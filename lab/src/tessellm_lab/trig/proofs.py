"""Proofs of trigonometric identities, line by line: who can take which step, and does a written proof hold?

A line follows from the one before by rewriting some of its places, all at once. Algebra: factor, collect, unwrap.
Identities: sin² + cos² → 1, 1 + tan² → sec², 1 + cot² → csc². The base knows algebra, an expert algebra and its own
identity; a prover that knows no rule for a place copies it. So at every token at most one expert departs from the
base: the place decides (Definition 4), and which place comes up depends on what was written before. A proof ends when
its line is the goal.

    prove  ① 2 ( sin² + cos² ) ② 2 tan² = ① 2 sec² :
    = ① 2 ( 1 ) ② 2 tan² = ① 2 ② 2 tan² = ① 2 ( 1 + tan² ) = ① 2 ( sec² ) = ① 2 sec² .
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from .expressions import ExpressionError, Sum, Term, equal_numerically, equal_symbolically, parse, sum_of, tokens

IDENTITIES: dict[str, tuple[Sum, Sum]] = {
    "sin² + cos²": (sum_of(Term(1, "sin²"), Term(1, "cos²")), sum_of(Term(1))),
    "1 + tan²": (sum_of(Term(1), Term(1, "tan²")), sum_of(Term(1, "sec²"))),
    "1 + cot²": (sum_of(Term(1), Term(1, "cot²")), sum_of(Term(1, "csc²"))),
}
PROVE, COLON, EQUALS, DOT = "prove", ":", "=", "."
LONGEST = 12  # lines


def redexes(expression: Sum) -> list[str]:
    """The identities that apply, from left to right."""
    return [name for name, _ in _steps(expression, frozenset())[1]]


def step(expression: Sum, known: frozenset[str], also: frozenset[int] = frozenset()) -> Sum:
    """The next line of a prover that knows these identities: every place it can rewrite, rewritten, the rest copied.

    `also` names places (numbers of `redexes`) whose identity somebody else applied.
    """
    return _steps(expression, known, also)[0]


def _steps(
    expression: Sum, known: frozenset[str], also: frozenset[int] = frozenset(), first: int = 0
) -> tuple[Sum, list[tuple[str, int]]]:
    """The rewritten expression, and the identities' places met on the way."""
    met: list[tuple[str, int]] = []
    made: list[Term] = []
    waiting = list(expression.terms)
    while waiting:
        term = waiting.pop(0)
        if not isinstance(term.body, Sum):
            joined = combine(term, waiting[0]) if waiting else None
            if joined is not None:
                waiting.pop(0)
            made.append(joined or term)
            continue
        name = identity_of(term.body)
        if name is not None:
            place = first + len(met)
            met.append((name, place))
            made.append(replace(term, body=IDENTITIES[name][1]) if name in known or place in also else term)
        elif len(term.body.terms) == 1:
            made.append(unwrap(term, term.body.terms[0]))
        else:
            body, inner = _steps(term.body, known, also, first + len(met))
            met += inner
            made.append(replace(term, body=body))
    return Sum(tuple(made)), met


def identity_of(body: Sum) -> str | None:
    return next((name for name, (left, _) in IDENTITIES.items() if body == left), None)


def combine(one: Term, other: Term) -> Term | None:
    """Algebra on two neighbours: like terms are collected, equal factors of different terms put outside."""
    if not (one.plain and other.plain):
        return None
    if one.body == other.body:
        return replace(one, factor=one.factor + other.factor)
    if one.factor == other.factor and identity_of(sum_of(Term(1, one.body), Term(1, other.body))) is not None:
        return replace(one, body=sum_of(Term(1, one.body), Term(1, other.body)))
    return None


def unwrap(term: Term, inner: Term) -> Term:
    """n ( m a ) → nm a."""
    return Term(term.factor * inner.factor, inner.body, term.mark)


@dataclass(frozen=True)
class Proof:
    """A goal and the lines after it; the first line is the left side."""

    left: Sum
    right: Sum
    lines: tuple[Sum, ...]

    @property
    def prompt(self) -> list[str]:
        return [PROVE, *tokens(self.left), EQUALS, *tokens(self.right), COLON]

    @property
    def continuation(self) -> list[str]:
        return [word for line in self.lines for word in (EQUALS, *tokens(line))] + [DOT]

    @property
    def continuation_lines(self) -> list[list[str]]:
        """The words of every line."""
        return [tokens(line) for line in self.lines]

    @property
    def needs(self) -> frozenset[str]:
        """The identities that its steps apply."""
        lines = (self.left, *self.lines)
        return frozenset(name for line in lines[:-1] for name in redexes(line))


def prove(left: Sum, known: frozenset[str]) -> Proof | None:
    """What a prover reaches from here and how; None where it gets nowhere or takes too long."""
    lines, line = [], left
    for _ in range(LONGEST):
        following = step(line, known)
        if following == line:
            break
        lines.append(line := following)
    return Proof(left, line, tuple(lines)) if lines and step(line, known) == line else None


@dataclass(frozen=True)
class Verdict:
    """Whether a written continuation proves its goal; if not, the first line at fault and why."""

    proved: bool
    line: int | None = None
    why: str = ""


def check(left: Sum, right: Sum, written: Sequence[str], symbolically: bool = True) -> Verdict:
    """A proof counts only if each line follows from the one before and the last is the goal.

    Follows: some of the known rewrites, applied at once, give it; and both are equal, at angles and as rational
    functions of sin². The first keeps out leaps: writing the goal at once is true and proves nothing.
    """
    if not written or written[-1] != DOT or DOT in written[:-1]:
        return Verdict(False, None, "does not end")
    if written[0] != EQUALS:
        return Verdict(False, 0, "does not begin with '='")
    before, line = left, left
    for number, words in enumerate(_split(written[1:-1])):
        try:
            line = parse(words)
        except ExpressionError as error:
            return Verdict(False, number, f"no expression: {error}")
        if not follows(before, line):
            return Verdict(False, number, "does not follow")
        if not equal_numerically(before, line) or (symbolically and not equal_symbolically(before, line)):
            return Verdict(False, number, "not equal")
        before = line
    return Verdict(True) if line == right else Verdict(False, None, "the goal is not reached")


def _split(words: Sequence[str]) -> Iterator[list[str]]:
    line: list[str] = []
    for word in words:
        if word == EQUALS:
            yield line
            line = []
        else:
            line.append(word)
    yield line


def follows(before: Sum, after: Sum) -> bool:
    """Is `after` some of the known rewrites of `before`, at least one, at once?"""
    return before != after and _matches(before.terms, after.terms)


def _matches(before: Sequence[Term], after: Sequence[Term]) -> bool:
    if not before or not after:
        return not before and not after
    one, rest = before[0], before[1:]
    if len(rest) and combine(one, rest[0]) == after[0] and _matches(rest[1:], after[1:]):
        return True
    return _becomes(one, after[0]) and _matches(rest, after[1:])


def _becomes(one: Term, other: Term) -> bool:
    """Copied, or rewritten inside."""
    if one == other:
        return True
    if not isinstance(one.body, Sum):
        return False
    name = identity_of(one.body)
    if name is not None and other == replace(one, body=IDENTITIES[name][1]):
        return True
    if len(one.body.terms) == 1 and other == unwrap(one, one.body.terms[0]):
        return True
    inside = isinstance(other.body, Sum) and (one.factor, one.mark) == (other.factor, other.mark)
    return inside and _matches(one.body.terms, other.body.terms)  # type: ignore[union-attr]
