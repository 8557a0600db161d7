"""LaTeX formulas as functions: enough of the language for final answers. Nothing is executed, nothing can run away.

    value("\\\\frac{\\\\sqrt{x}}{2}", {"x": 2})   a complex number of 40 digits

Two formulas are compared at points, so no algebra system has to be trusted to simplify what a model wrote. Knows
nothing of tasks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import mpmath

LONGEST = 400  # characters of a formula
LARGEST = 1e6  # of a factorial's argument, of a power's logarithm
DIGITS = 40
DEEPEST = 40  # brackets within brackets

Values = Mapping[str, mpmath.mpf]
Node = Callable[[Values], mpmath.mpc]

_TOKEN = re.compile(r"\d+\.?\d*|\.\d+|\\[a-zA-Z]+|\\.|\S")
_FUNCTIONS: dict[str, Callable] = {
    **{
        rf"\{name}": getattr(mpmath, name) for name in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "exp")
    },
    **{rf"\arc{name}": getattr(mpmath, f"a{name}") for name in ("sin", "cos", "tan")},
    r"\ln": mpmath.log,
}
_CONSTANTS: dict[str, Callable[[], mpmath.mpc]] = {
    r"\pi": lambda: +mpmath.pi,
    "π": lambda: +mpmath.pi,
    "e": lambda: +mpmath.e,
    "i": lambda: mpmath.mpc(0, 1),
    r"\infty": lambda: mpmath.inf,
}
_CLOSING = {"(": ")", "[": "]", "{": "}", r"\{": r"\}", r"\lfloor": r"\rfloor", r"\lceil": r"\rceil"}
_TIMES, _OVER = {"*", r"\cdot", r"\times", "·", "×"}, {"/", r"\div", "÷"}


class FormulaError(ValueError):
    """No formula, or one that this module does not read."""


def names(formula: str) -> set[str]:
    """The variables of a formula."""
    return _Parser(formula).parsed()[1]


def value(formula: str, at: Values) -> mpmath.mpc:
    """What a formula is worth, its variables being what `at` says."""
    with mpmath.workdps(DIGITS):
        try:
            return mpmath.mpc(_Parser(formula).parsed()[0](at))
        except (ArithmeticError, ValueError, TypeError, KeyError) as error:
            raise FormulaError(f"{formula!r} has no value: {error}") from error


class _Parser:
    """Recursive descent; each method reads one construct from the front of the tokens."""

    def __init__(self, formula: str):
        if len(formula) > LONGEST:
            raise FormulaError(f"{len(formula)} characters are too many for a final answer")
        self.tokens = _TOKEN.findall(formula)
        self.names: set[str] = set()
        self.bars = self.depth = 0

    def parsed(self) -> tuple[Node, set[str]]:
        node = self.sum()
        if self.tokens:
            raise FormulaError(f"unexpected {self.tokens[0]!r}")
        return node, self.names

    def next(self) -> str:
        return self.tokens[0] if self.tokens else ""

    def take(self, expected: str | None = None) -> str:
        if not self.tokens or (expected is not None and self.tokens[0] != expected):
            raise FormulaError(f"expected {expected or 'more'!r}; got {self.next() or 'the end'!r}")
        return self.tokens.pop(0)

    def sum(self) -> Node:
        self.depth += 1
        if self.depth > DEEPEST:
            raise FormulaError("too many brackets within brackets")
        node = self.term()
        while self.next() in {"+", "-", "−"}:
            plus, left, right = self.take() == "+", node, self.term()
            node = _plus(left, right) if plus else _minus(left, right)
        self.depth -= 1
        return node

    def term(self) -> Node:
        node = self.signed()
        while self.next() in _TIMES | _OVER or self.starts_atom():
            over = self.next() in _OVER
            if self.next() in _TIMES | _OVER:
                self.take()
                right = self.signed()
            else:
                right = self.power()
            node = _over(node, right) if over else _times(node, right)
        return node

    def signed(self) -> Node:
        if self.next() in {"-", "−"}:
            self.take()
            inner = self.signed()
            return lambda at: -inner(at)
        if self.next() == "+":
            self.take()
            return self.signed()
        return self.power()

    def power(self) -> Node:
        node = self.atom()
        while self.next() in {"^", "!"}:
            node = _factorial(node) if self.take() == "!" else _raised(node, self.argument(whole=True))
        return node

    def starts_atom(self) -> bool:
        token = self.next()
        if token == "|":
            return not self.bars
        return bool(token) and (
            token[0].isalnum()
            or token[0] == "."
            or token in {"(", "[", "{", r"\frac", r"\sqrt", r"\binom", r"\log", *_FUNCTIONS, *_CONSTANTS}
            or (token[0] == "\\" and token in _CLOSING)
            or _is_letter(token)
        )

    def atom(self) -> Node:
        token = self.take()
        if token[0].isdigit() or token[0] == ".":
            return self.number(token)
        if token in _CLOSING:
            inner = self.sum()
            self.take(_CLOSING[token])
            rounded = {r"\lfloor": mpmath.floor, r"\lceil": mpmath.ceil}.get(token)
            return inner if rounded is None else lambda at: rounded(inner(at).real)
        if token == "|":
            return self.absolute()
        if token == r"\frac":
            return _over(self.argument(), self.argument())
        if token == r"\sqrt":
            return self.root()
        if token == r"\binom":
            above, below = self.argument(), self.argument()
            return lambda at: mpmath.binomial(_moderate(above(at)), _moderate(below(at)))
        if token in _FUNCTIONS or token == r"\log":
            return self.function(token)
        if token in _CONSTANTS and self.next() != "_":
            constant = _CONSTANTS[token]
            return lambda at: constant()
        if token.isalpha() or _is_letter(token):
            return self.variable(token)
        raise FormulaError(f"unexpected {token!r}")

    def number(self, token: str) -> Node:
        if self.next() == "_":
            return self.variable(token)  # 1011_2: digits in another base stand for themselves

        def node(at: Values) -> mpmath.mpc:
            return mpmath.mpf(token)

        mixed = token.isdigit() and self.next() == r"\frac" and re.fullmatch(r"[{}\d]+", "".join(self.tokens[1:]))
        if not mixed:
            return node
        fraction = self.atom()  # 3\frac{1}{2} is three and a half
        return lambda at: node(at) + fraction(at)

    def absolute(self) -> Node:
        self.bars += 1
        inner = self.sum()
        self.bars -= 1
        self.take("|")
        return lambda at: abs(inner(at))

    def root(self) -> Node:
        degree: Node = lambda at: mpmath.mpf(2)  # noqa: E731
        if self.next() == "[":
            self.take()
            degree = self.sum()
            self.take("]")
        inner = self.argument()

        def node(at: Values) -> mpmath.mpc:
            number, n = mpmath.mpc(inner(at)), degree(at)
            odd = n == int(n.real) and int(n.real) % 2 == 1
            if odd and not number.imag and number.real < 0:
                return -((-number.real) ** (1 / n))  # the real root
            return number ** (1 / n)

        return node

    def function(self, token: str) -> Node:
        base: Node | None = None
        raised: Node | None = None
        if self.next() == "_" and token == r"\log":
            self.take()
            base = self.argument()
        if self.next() == "^":
            self.take()
            raised = self.argument()
        inner = self.atom() if self.next() in {"(", "{", "["} else self.tight()
        call = _FUNCTIONS.get(token, mpmath.log10)

        def node(at: Values) -> mpmath.mpc:
            return mpmath.log(inner(at)) / mpmath.log(base(at)) if base is not None else call(inner(at))

        return node if raised is None else _raised(node, raised)

    def tight(self) -> Node:
        """What a function without parentheses takes: factors up to the next operator or function."""
        node = self.signed()
        while self.starts_atom() and self.next() not in _FUNCTIONS and self.next() not in {r"\log", "("}:
            node = _times(node, self.power())
        return node

    def variable(self, name: str) -> Node:
        if self.next() == "_":
            self.take()
            if self.next() == "{":
                self.take()
                inside = []
                while self.next() not in {"}", ""}:
                    inside.append(self.take())
                self.take("}")
                name += "_" + "".join(inside)
            else:
                name += "_" + self.take()
        self.names.add(name)
        return lambda at: at[name]

    def argument(self, whole: bool = False) -> Node:
        """A group, or one token; of a number only the first digit, unless the whole."""
        if self.next() == "{":
            self.take()
            inner = self.sum()
            self.take("}")
            return inner
        if not whole and len(self.next()) > 1 and self.next().isdigit():
            digits = self.take()
            self.tokens.insert(0, digits[1:])
            first = digits[0]
            return lambda at: mpmath.mpf(first)
        return self.signed() if self.next() in {"-", "−"} else self.atom()


def _is_letter(token: str) -> bool:
    """Greek and the like: a command that stands for a letter."""
    return bool(
        re.fullmatch(r"\\(alpha|beta|gamma|delta|epsilon|theta|lambda|mu|rho|sigma|tau|phi|varphi|omega)", token)
    )


def _plus(left: Node, right: Node) -> Node:
    return lambda at: left(at) + right(at)


def _minus(left: Node, right: Node) -> Node:
    return lambda at: left(at) - right(at)


def _times(left: Node, right: Node) -> Node:
    return lambda at: left(at) * right(at)


def _over(left: Node, right: Node) -> Node:
    return lambda at: left(at) / right(at)


def _factorial(node: Node) -> Node:
    return lambda at: mpmath.factorial(_moderate(node(at)))


def _raised(base: Node, exponent: Node) -> Node:
    def node(at: Values) -> mpmath.mpc:
        b, e = mpmath.mpc(base(at)), mpmath.mpc(exponent(at))
        if b and abs(e * mpmath.log(b)) > LARGEST:
            raise ValueError("a power too large to compare")
        return b**e

    return node


def _moderate(number: mpmath.mpc) -> mpmath.mpc:
    if abs(number) > LARGEST:
        raise ValueError("a number too large for a factorial")
    return number
