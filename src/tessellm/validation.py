"""What pydantic found wrong with something a user wrote, in one line: where, what was expected, what came.

Knows how to say it, and no fields: callers bring what they expect, by key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from .errors import nearest

UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")  # of models, of dataclasses
LONGEST = 80  # characters that a message shows of a value


def explain(
    error: ValidationError, expected: Mapping[str, str], known: Callable[[tuple[str, ...]], Iterable[str]]
) -> str:
    """All problems, misspelt keys first. `expected` says what a key should hold; `known` which keys there are at a
    place."""
    found = sorted(error.errors(), key=lambda problem: problem["type"] not in UNKNOWN)
    messages: dict[str, str] = {}  # of a value with several forms, the first form's problem
    for text in (_explain(problem, expected, known) for problem in found):
        messages.setdefault(text.partition(": expected ")[0], text)
    return "; ".join(messages.values())


def _explain(problem: Any, expected: Mapping[str, str], known: Callable[[tuple[str, ...]], Iterable[str]]) -> str:
    place = [str(part) for part in problem["loc"]]
    if problem["type"] in UNKNOWN:
        return f"unknown key {'.'.join(place)!r}; {nearest(place[-1], known(tuple(place)))}"
    if problem["type"] == "missing":
        return f"the key {'.'.join(place)!r} is missing"
    if problem["type"] == "value_error":
        return f"{'.'.join([*place, ''])[:-1]}{': ' if place else ''}{problem['ctx']['error']}"
    if place[-1] == "[key]":
        return f"{place[0]}: expected names of letters; got {shown(problem['input'])}"
    deepest = max((number for number, part in enumerate(place) if part in expected), default=len(place) - 1)
    in_entry = deepest == 0 and len(place) > 1 and f"{place[0]}.*" in expected
    where = place[:2] if in_entry else place[: deepest + 1]
    wanted = expected[f"{place[0]}.*"] if in_entry else expected.get(place[deepest], "text")
    return f"{'.'.join(where)}: expected {wanted}; got {shown(problem['input'])}"


def shown(value: Any) -> str:
    """A value as messages show it: short, and never a whole structure."""
    if isinstance(value, str | int | float | bool):
        text = repr(value) if not isinstance(value, int) or abs(value) < 10**LONGEST else "a very large number"
        return text if len(text) <= LONGEST else f"{text[:LONGEST]}… ({len(text)} characters)"
    return kind(value)


def kind(value: Any) -> str:
    """What sort of thing a value is, in a user's words."""
    kinds = {type(None): "nothing", dict: "a mapping" if value else "an empty mapping", list: "a list", str: "text"}
    return kinds.get(type(value), type(value).__name__)
