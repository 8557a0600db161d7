"""Test problems of three kinds, in the forms of GSM8K and HumanEval+: answers, functions, and functions that need both.

A problem's skeleton (numbers and signs, or lines of code) says whether it is for training, development or test. So no
model has read a test problem's worked answer or body in other words.
"""

from __future__ import annotations

import hashlib
import json
import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .functions import INDENT, Function, inputs, write_function
from .stories import Step, Story, write_story

KINDS = ("math", "code", "mixed")
SPLITS = {"test": 0, "development": 1}  # of eight parts; the others are for training
PARTS = 8
TESTS = (3, 5)  # inputs of a problem's base tests and of its extra tests


@dataclass(frozen=True)
class Level:
    """How hard the problems are."""

    largest: int  # number
    events: tuple[int, int]  # in a story
    operations: int  # known ones
    lines: tuple[int, int]  # of a body, before it returns


@dataclass(frozen=True)
class Problem:
    """What a model is asked, what a right text is, and what judges need."""

    kind: str
    prompt: str
    gold: str
    facts: dict[str, Any]


def part(skeleton: str) -> str:
    """The split that a skeleton belongs to."""
    number = zlib.crc32(skeleton.encode()) % PARTS
    return next((name for name, own in SPLITS.items() if own == number), "training")


def story_of(rng: random.Random, level: Level, split: str) -> Story:
    while part((story := write_story(rng, level.largest, level.events)).skeleton) != split:
        pass
    return story


def function_of(rng: random.Random, level: Level, split: str, with_n: bool = False) -> Function:
    while part((made := write_function(rng, level.operations, level.lines, with_n)).skeleton) != split:
        pass
    return made


def asked_for_answer(story: Story) -> str:
    return f"Question: {story.question}\nAnswer:"


def answer_text(steps: Sequence[Step]) -> str:
    lines = "\n".join(map(str, steps))
    return f" {lines}\n#### {steps[-1].result}"


def asked_for_function(function: Function) -> str:
    return f'def {function.name}(values, n):\n{INDENT}"""{function.asked}"""\n'


def asked_for_both(story: Story, function: Function) -> str:
    told = f"{story.text} Let n be the number of {story.things} that {story.name} has now. {function.asked}"
    return f'def {function.name}(values):\n{INDENT}"""{told}"""\n'


def notes(steps: Sequence[Step]) -> str:
    """Steps as comments of a function."""
    return "".join(f"{INDENT}# {step}\n" for step in steps)


def problems(kind: str, count: int, level: Level, seed: int, split: str = "test") -> list[Problem]:
    """So many problems, no two with the same prompt."""
    rng, made = random.Random(f"{kind}/{split}/{seed}"), dict[str, Problem]()
    while len(made) < count:
        problem = _math(rng, level, split) if kind == "math" else _coding(rng, level, split, kind == "mixed")
        if problem is not None:
            made.setdefault(problem.prompt, problem)
    return list(made.values())


def _math(rng: random.Random, level: Level, split: str) -> Problem:
    story = story_of(rng, level, split)
    gold = answer_text(story.steps)
    return Problem(
        "math", asked_for_answer(story), gold, {"question": story.question, "answer": gold.removeprefix(" ")}
    )


def _coding(rng: random.Random, level: Level, split: str, mixed: bool) -> Problem | None:
    """One in evalplus' form; None: this function hardly depends on its n."""
    function = function_of(rng, level, split, with_n=mixed)
    story = story_of(rng, level, split) if mixed else None
    n = story.answer if story else rng.randint(2, level.largest)
    lists = inputs(function, n, rng, sum(TESTS)) if mixed else [_list(rng, n) for _ in range(sum(TESTS))]
    if lists is None:
        return None
    given = [[values] if mixed else [values, n] for values in lists]
    if story is None:
        prompt, gold = asked_for_function(function), function.body
    else:
        prompt = asked_for_both(story, function)
        gold = f"{notes(story.steps)}{INDENT}n = {n}\n{function.body}"
    facts = {
        "prompt": prompt,
        "entry_point": function.name,
        "canonical_solution": gold + "\n",
        "base_input": given[: TESTS[0]],
        "plus_input": given[TESTS[0] :],
        "contract": "",
        "atol": 0,
    }
    return Problem("mixed" if mixed else "code", prompt, gold, facts)


def _list(rng: random.Random, n: int) -> list[int]:
    return [max(0, n + rng.randint(-6, 6)) for _ in range(rng.randint(4, 7))]


def digest(asked: Sequence[Problem]) -> str:
    """What tells whether samples were written for these problems."""
    content = json.dumps([[problem.prompt, problem.facts] for problem in asked])
    return hashlib.sha256(content.encode()).hexdigest()[:16]
