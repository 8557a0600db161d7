"""Whether two regular expressions match the same strings, by probes: all paths are walked at once."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable
from re import _parser as sre_parse  # type: ignore[attr-defined]
from typing import Any

PROBES, LONGEST, MOST_STATES, MOST_REPEATS = 220, 300, 4000, 30
ATOMS = ("a", "e", "k", "B", "E", "K", "7", "0", " ", "-", "ab", "Ox", "42")
LENGTHS = (0, 1, 1, 2, 2, 3, 3, 4, 5, 6, 8)
AT_START, AT_END = ("AT_BEGINNING", "AT_BEGINNING_STRING"), ("AT_END", "AT_END_STRING")
BOUNDARY = ("AT_BOUNDARY", "AT_NON_BOUNDARY")


class UnknownRegexError(Exception):
    """An expression that cannot be walked: broken, too large, or of an unusual form."""


def same_on_probes(written: str, wanted: str) -> bool:
    """Whether both match the same of some strings made of their letters, and not all or none of them."""
    if not written or len(written) > LONGEST:
        return False
    try:
        theirs, ours = Walker(written), Walker(wanted)
    except (UnknownRegexError, RecursionError):
        return False
    draw = random.Random(wanted)
    literals = re.findall(r"[A-Za-z]{2,}", re.sub(r"\[.*?\]|\\.", " ", wanted + " " + written))[:6]
    atoms, matched = [*literals * 3, *ATOMS], 0
    for _ in range(PROBES):
        text = "".join(draw.choice(atoms) for _ in range(draw.choice(LENGTHS)))
        expected = ours.matches(text)
        matched += expected
        if expected != theirs.matches(text):
            return False
    return 0 < matched < PROBES


class Walker:
    """A nondeterministic automaton of an expression."""

    def __init__(self, pattern: str):
        self._free: list[list[int]] = []  # steps that read nothing
        self._reading: list[tuple[Callable[[str], bool], int] | None] = []
        self._place: list[tuple[str, int] | None] = []
        try:
            parsed = sre_parse.parse(pattern)
        except Exception as error:  # a broken expression
            raise UnknownRegexError(str(error)) from error
        self._start, self._end = self._sequence(parsed)

    def matches(self, text: str) -> bool:
        """Whether the whole text matches."""
        states = self._closed([self._start], text, 0)
        for place, character in enumerate(text, 1):
            steps = [self._reading[state] for state in states]
            reached = [step[1] for step in steps if step is not None and step[0](character)]
            states = self._closed(reached, text, place)
        return self._end in states

    def _state(self) -> int:
        if len(self._free) > MOST_STATES:
            raise UnknownRegexError("too large")
        self._free.append([])
        self._reading.append(None)
        self._place.append(None)
        return len(self._free) - 1

    def _sequence(self, parsed: Iterable[tuple[Any, Any]]) -> tuple[int, int]:
        start = end = self._state()
        for kind, value in parsed:
            entry, following = self._one(str(kind), value)
            self._free[end].append(entry)
            end = following
        return start, end

    def _one(self, kind: str, value: Any) -> tuple[int, int]:
        if kind in ("MAX_REPEAT", "MIN_REPEAT"):
            return self._repeat(*value)
        if kind == "SUBPATTERN":
            return self._sequence(value[-1])
        start, end = self._state(), self._state()
        if kind == "BRANCH":
            for branch in value[1]:
                entry, following = self._sequence(branch)
                self._free[start].append(entry)
                self._free[following].append(end)
        elif kind == "AT" and str(value) in (*AT_START, *AT_END, *BOUNDARY):
            self._place[start] = (str(value), end)
        else:
            self._reading[start] = (_reader(kind, value), end)
        return start, end

    def _repeat(self, least: int, most: Any, inner: Any) -> tuple[int, int]:
        endless = str(most) == "MAXREPEAT"
        if least > MOST_REPEATS or (not endless and most > MOST_REPEATS):
            raise UnknownRegexError("count")
        start = last = self._state()
        for _ in range(least):
            entry, following = self._sequence(inner)
            self._free[last].append(entry)
            last = following
        end = self._state()
        if endless:
            entry, following = self._sequence(inner)
            self._free[last] += [entry, end]
            self._free[following] += [entry, end]
            return start, end
        self._free[last].append(end)
        for _ in range(most - least):
            entry, following = self._sequence(inner)
            self._free[last].append(entry)
            last = following
            self._free[last].append(end)
        return start, end

    def _closed(self, states: list[int], text: str, place: int) -> set[int]:
        todo, found = list(states), set(states)
        while todo:
            state = todo.pop()
            following, at = list(self._free[state]), self._place[state]
            if at is not None and _is_at(at[0], text, place):
                following.append(at[1])
            todo += set(following) - found
            found.update(following)
        return found


def _reader(kind: str, value: Any) -> Callable[[str], bool]:
    if kind == "LITERAL":
        return lambda character: ord(character) == value
    if kind == "NOT_LITERAL":
        return lambda character: ord(character) != value
    if kind == "ANY":
        return lambda character: character != "\n"
    if kind == "IN":
        return lambda character: _in_set(value, character)
    raise UnknownRegexError(kind)


def _in_set(items: Iterable[tuple[Any, Any]], character: str) -> bool:
    negated = hit = False
    for kind, value in items:
        name = str(kind)
        if name == "NEGATE":
            negated = True
        elif name == "LITERAL":
            hit |= ord(character) == value
        elif name == "RANGE":
            hit |= value[0] <= ord(character) <= value[1]
        elif name == "CATEGORY":
            hit |= _in_category(str(value), character)
        else:
            raise UnknownRegexError(name)
    return hit != negated


def _in_category(name: str, character: str) -> bool:
    kind = name.replace("CATEGORY_", "").replace("NOT_", "")
    known = {"DIGIT": character.isdigit(), "SPACE": character.isspace(), "WORD": _in_word(character)}
    if kind not in known:
        raise UnknownRegexError(name)
    return known[kind] != ("NOT_" in name)


def _in_word(character: str) -> bool:
    return character.isalnum() or character == "_"


def _is_at(name: str, text: str, place: int) -> bool:
    if name in AT_START:
        return place == 0
    if name in AT_END:
        return place == len(text)
    before = place > 0 and _in_word(text[place - 1])
    after = place < len(text) and _in_word(text[place])
    return (before != after) == (name == "AT_BOUNDARY")
