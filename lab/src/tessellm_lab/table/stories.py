"""Word problems about a running number of things, with worked answers: right ones, and such as know the form alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

NAMES = ("Mia", "Tom", "Ana", "Ben", "Lea", "Max", "Eva", "Sam", "Ida", "Jon", "Zoe", "Kai")
THINGS = ("apples", "books", "coins", "cards", "shells", "stamps", "pens", "plums", "stones", "eggs", "cups", "keys")
FACTORS = {2: "doubles", 3: "triples"}
SIGNS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a // b,
}
MORE = (
    "{name} buys {n} more.",
    "{friend} gives {name} {n} more.",
    "Then {name} finds {n} more.",
    "{name} gets {n} {things} from {friend}.",
)
LESS = (
    "{name} gives {n} to {friend}.",
    "{name} loses {n} of them.",
    "Then {name} sells {n} {things}.",
    "{friend} takes {n} of them away.",
)
PACKS = ("{name} buys {k} boxes of {n} {things} each.", "{friend} brings {k} bags with {n} {things} in each.")
TIMES = ("Then the number of {things} {verb}.", "By magic, the number {verb}.")
HALF = ("{name} gives half of them to {friend}.", "Half of the {things} get lost.")


@dataclass(frozen=True)
class Step:
    """One line of a worked answer."""

    left: int
    sign: str
    right: int
    result: int

    def __str__(self) -> str:
        return f"{self.left} {self.sign} {self.right} = {self.result}"


@dataclass(frozen=True)
class Story:
    """What happens, and how one gets at the number in the end."""

    text: str
    name: str
    things: str
    steps: tuple[Step, ...]

    @property
    def question(self) -> str:
        return f"{self.text} How many {self.things} does {self.name} have now?"

    @property
    def answer(self) -> int:
        return self.steps[-1].result

    @property
    def skeleton(self) -> str:
        """The problem without names and things: two with the same skeleton have the same worked answer."""
        return "; ".join(map(str, self.steps))


def step(left: int, sign: str, right: int) -> Step:
    return Step(left, sign, right, SIGNS[sign](left, right))


def write_story(rng: random.Random, largest: int, events: tuple[int, int]) -> Story:
    """A story of so many events, in which no number is larger than `largest`."""
    name, friend = rng.sample(NAMES, 2)
    things, total = rng.choice(THINGS), rng.randint(2, largest // 2)
    parts, steps = [f"{name} has {total} {things}."], []
    for _ in range(rng.randint(*events)):
        line, some = _event(rng, total, largest)
        parts.append(line.format(name=name, friend=friend, things=things, **some[1]))
        steps += some[0]
        total = steps[-1].result
    return Story(" ".join(parts), name, things, tuple(steps))


def _event(rng: random.Random, total: int, largest: int) -> tuple[str, tuple[list[Step], dict[str, int | str]]]:
    """What happens next: its sentence, its steps, the sentence's numbers."""
    kinds = ["more"] * (total < largest) + ["less"] * (total > 1) + ["half"] * (total > 1 and total % 2 == 0)
    kinds += ["times"] * (0 < total <= largest // 2) + ["packs"] * (total <= largest - 6)
    kind = rng.choice(kinds)
    if kind == "more":
        n = rng.randint(1, largest - total)
        return rng.choice(MORE), ([step(total, "+", n)], {"n": n})
    if kind == "less":
        n = rng.randint(1, total - 1)
        return rng.choice(LESS), ([step(total, "-", n)], {"n": n})
    if kind == "half":
        return rng.choice(HALF), ([step(total, "/", 2)], {})
    if kind == "times":
        k = rng.choice([k for k in FACTORS if total * k <= largest])
        return rng.choice(TIMES), ([step(total, "*", k)], {"verb": FACTORS[k]})
    k = rng.randint(2, min(9, (largest - total) // 2))
    n = rng.randint(2, max(2, min(9, (largest - total) // k)))
    inside = step(k, "*", n)
    return rng.choice(PACKS), ([inside, step(total, "+", inside.result)], {"k": k, "n": n})


def unlearned(rng: random.Random, story: Story, largest: int) -> tuple[Step, ...]:
    """Steps as someone writes them who knows nothing but their form: any numbers, any signs."""

    def any_number() -> int:
        return rng.randint(1, largest)

    count = max(1, len(story.steps) + rng.choice((-1, 0, 0, 1)))
    return tuple(Step(any_number(), rng.choice("+-*/"), any_number(), any_number()) for _ in range(count))
