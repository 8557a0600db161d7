"""Small Python functions on lists: docstrings, bodies, tests; right bodies, and such as know the form alone."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

NAMES = ("change", "handle", "convert", "process", "treat", "rework", "transform", "adapt", "modify", "arrange")


@dataclass(frozen=True)
class Operation:
    """A line of a body, and how docstrings ask for it."""

    line: str
    asked: tuple[str, ...]

    @property
    def uses_n(self) -> bool:
        return re.search(r"\bn\b", self.line) is not None


OPERATIONS = (
    Operation(
        "values = [v for v in values if v > n]", ("Keep the values above n.", "Drop values that are not above n.")
    ),
    Operation("values = [v + n for v in values]", ("Add n to every value.", "Raise each value by n.")),
    Operation("values = sorted(values)", ("Sort the values.", "Put the values in order.")),
    Operation("values = values + [n]", ("Append n.", "Put n at the end.")),
    Operation("values = values[::-1]", ("Reverse the values.", "Turn the list around.")),
    Operation("values = [v * 2 for v in values]", ("Double every value.", "Take each value twice as large.")),
    Operation(
        "values = [v for v in values if v < n]", ("Keep the values below n.", "Drop values that are not below n.")
    ),
    Operation("values = [v - n for v in values]", ("Subtract n from every value.", "Lower each value by n.")),
    Operation("values = [v for v in values if v != n]", ("Remove the values equal to n.", "Drop every n.")),
    Operation("values = [v * n for v in values]", ("Multiply every value by n.", "Scale each value by n.")),
    Operation("values = [min(v, n) for v in values]", ("Cap the values at n.", "Replace values above n by n.")),
    Operation("values = [max(v, n) for v in values]", ("Lift the values to n.", "Replace values below n by n.")),
    Operation("values = [n] + values", ("Put n in front.", "Start the list with n.")),
    Operation("values = [v for v in values if v % 2 == 0]", ("Keep the even values.", "Drop the odd values.")),
    Operation("values = [v for v in values if v % 2 == 1]", ("Keep the odd values.", "Drop the even values.")),
    Operation("values = sorted(values, reverse=True)", ("Sort with the largest first.", "Order from high to low.")),
    Operation("values = [v * v for v in values]", ("Square every value.", "Multiply each value by itself.")),
    Operation("values = [-v for v in values]", ("Negate every value.", "Change the sign of each value.")),
    Operation("values = list(dict.fromkeys(values))", ("Keep one of each value.", "Remove repeated values.")),
    Operation("values = values[1:]", ("Leave out the first value.", "Skip the first value.")),
)
ENDINGS = (
    Operation("return values", ("Return the list.", "Return the values.")),
    Operation("return sum(values)", ("Return the sum.", "Return the total.")),
    Operation("return len(values)", ("Return how many there are.", "Return the count.")),
)
INDENT = "    "


@dataclass(frozen=True)
class Function:
    """A function as a docstring asks for it."""

    name: str
    asked: str
    operations: tuple[Operation, ...]

    @property
    def body(self) -> str:
        """Its lines, without what makes n."""
        return body(self.operations)

    @property
    def skeleton(self) -> str:
        return "; ".join(operation.line for operation in self.operations)

    def __call__(self, values: Sequence[int], n: int) -> Any:
        return _made(self.body)(list(values), n)


@lru_cache(maxsize=64)
def _made(lines: str) -> Callable[[list[int], int], Any]:
    scope: dict[str, Any] = {}
    exec(f"def made(values, n):\n{lines}", scope)
    made: Callable[[list[int], int], Any] = scope["made"]
    return made


def body(operations: Sequence[Operation]) -> str:
    return "\n".join(INDENT + operation.line for operation in operations)


def write_function(rng: random.Random, known: int, lines: tuple[int, int], with_n: bool = False) -> Function:
    """A function of so many lines of the first `known` operations. `with_n`: one at least uses n."""
    while True:
        chosen = (*rng.sample(OPERATIONS[:known], rng.randint(*lines)), rng.choice(ENDINGS))
        if not with_n or any(operation.uses_n for operation in chosen):
            asked = " ".join(rng.choice(operation.asked) for operation in chosen)
            return Function(rng.choice(NAMES), asked, chosen)


def unlearned(rng: random.Random, known: int, lines: tuple[int, int]) -> tuple[Operation, ...]:
    """A body as someone writes it who knows nothing but the form: any lines."""
    return write_function(rng, known, lines).operations


def inputs(function: Function, n: int, rng: random.Random, count: int, tries: int = 20) -> list[list[int]] | None:
    """Lists that each tell n from its neighbours; None where the function hardly depends on n."""
    made: list[list[int]] = []
    for _ in range(tries * count):
        values = [max(0, n + rng.randint(-6, 6)) for _ in range(rng.randint(4, 7))]
        if all(function(values, n) != function(values, other) for other in (n - 1, n + 1)):
            made.append(values)
            if len(made) == count:
                return made
    return None
