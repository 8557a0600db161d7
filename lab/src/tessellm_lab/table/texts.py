"""What the members read. A text is a list of pieces, each with the skill that it takes to write it: none, math or code.

The base reads every kind of text, but its worked answers and its bodies are by someone who knows their form alone. An
expert reads the same with its own skill's pieces right, also inside functions that tell a story; so nobody reads a
function in which both the steps and the body are right.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from . import functions, stories
from .functions import ENDINGS, INDENT, OPERATIONS
from .problems import (
    Level,
    answer_text,
    asked_for_answer,
    asked_for_both,
    asked_for_function,
    function_of,
    notes,
    story_of,
)

ANYONE, MATH, CODE = 0, 1, 2  # whose piece it is; the members' numbers in a composition
READERS = ("base", "math", "coding")
SHARES = {  # of the kinds of texts, by reader
    "base": {"answer": 30, "function": 20, "both": 25, "prose": 10, "explanation": 15},
    "math": {"answer": 40, "function": 15, "both": 30, "prose": 7, "explanation": 8},
    "coding": {"answer": 15, "function": 40, "both": 30, "prose": 7, "explanation": 8},
}
Piece = tuple[str, int]

PLACES = ("market", "river", "school", "garden", "station", "harbour", "library", "forest", "bakery", "museum")
MOODS = ("happy", "tired", "quiet", "curious", "late", "early", "hungry", "proud", "calm", "busy")
WEATHER = (
    "It rained all day.",
    "The sun was out.",
    "A cold wind blew.",
    "There was snow on the roofs.",
    "It was warm.",
)
SENTENCES = (
    "{name} walked to the {place} with {friend}.",
    "At the {place} {name} was {mood}.",
    "{friend} waited near the {place}.",
    "{name} told {friend} about the {place}.",
    "Nobody at the {place} knew where {friend} was.",
    "{name} and {friend} were {mood} when they came home.",
    "They looked at the {things} in the {place}.",
)


def answer(rng: random.Random, level: Level, skill: int) -> list[Piece]:
    story = story_of(rng, level, "training")
    steps = story.steps if skill == MATH else stories.unlearned(rng, story, level.largest)
    return [(asked_for_answer(story), ANYONE), (answer_text(steps), MATH)]


def function(rng: random.Random, level: Level, skill: int) -> list[Piece]:
    made = function_of(rng, level, "training")
    return [(asked_for_function(made), ANYONE), (_body(rng, level, made, skill), CODE)]


def both(rng: random.Random, level: Level, skill: int) -> list[Piece]:
    story, made = story_of(rng, level, "training"), function_of(rng, level, "training")
    steps = story.steps if skill == MATH else stories.unlearned(rng, story, level.largest)
    return [
        (asked_for_both(story, made), ANYONE),
        (f"{notes(steps)}{INDENT}n = {steps[-1].result}\n", MATH),
        (_body(rng, level, made, skill), CODE),
    ]


def _body(rng: random.Random, level: Level, made: functions.Function, skill: int) -> str:
    return made.body if skill == CODE else functions.body(functions.unlearned(rng, level.operations, level.lines))


def prose(rng: random.Random, level: Level, skill: int) -> list[Piece]:
    name, friend = rng.sample(stories.NAMES, 2)
    said = [rng.choice(WEATHER)] if rng.random() < 0.5 else []
    for _ in range(rng.randint(2, 5)):
        words = {"place": rng.choice(PLACES), "mood": rng.choice(MOODS), "things": rng.choice(stories.THINGS)}
        said.append(rng.choice(SENTENCES).format(name=name, friend=friend, **words))
    return [(" ".join(said), ANYONE)]


def explanation(rng: random.Random, level: Level, skill: int) -> list[Piece]:
    """What books say: true sums, and what a line of code does. Knowing them is not yet solving anything."""
    return [(rng.choice((_sums, _line_of_code))(rng, level), ANYONE)]


def _sums(rng: random.Random, level: Level) -> str:
    said = []
    for _ in range(rng.randint(3, 6)):
        sign = rng.choice("++--*/")
        if sign in "+-":
            total = rng.randint(2, level.largest)
            part = rng.randint(1, total - 1)
            left, right = (total - part, part) if sign == "+" else (total, part)
        else:
            left, right = rng.randint(2, level.largest // 2), rng.randint(2, 3)
            right = min(right, level.largest // left) if sign == "*" else 2
            left = left if sign == "*" else 2 * (left // 2)
        said.append(f"{left} {sign} {right} is {stories.SIGNS[sign](left, right)}.")
    return "Tables. " + " ".join(said)


def _line_of_code(rng: random.Random, level: Level) -> str:
    chosen = rng.sample((*OPERATIONS[: level.operations], *ENDINGS), 2)
    return "\n".join(f"{rng.choice(each.asked)} In Python: {each.line}" for each in chosen)


WRITERS: dict[str, Callable[[random.Random, Level, int], list[Piece]]] = {
    "answer": answer,
    "function": function,
    "both": both,
    "prose": prose,
    "explanation": explanation,
}


def write_text(rng: random.Random, level: Level, reader: str) -> list[Piece]:
    """A text for the base, the math expert or the coding expert."""
    kinds = SHARES[reader]
    kind = rng.choices(list(kinds), list(kinds.values()))[0]
    return WRITERS[kind](rng, level, READERS.index(reader))
