"""Which texts weights are found on, and which judge them: drawn by a seed, from every skill alike. Knows no model."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True)
class DevelopmentText:
    """A text as token ids, how many of them are a prompt, and the skill that it is of ("": one among all)."""

    ids: tuple[int, ...]
    prompt: int = 0
    skill: str = ""

    @property
    def start(self) -> int:
        """The first token whose likelihood counts; the first of all is never predicted."""
        return max(1, self.prompt)

    @property
    def counted(self) -> int:
        """How many tokens count."""
        return max(0, len(self.ids) - self.start)


def hold_out(
    texts: Sequence[DevelopmentText], share: float, seed: int
) -> tuple[list[DevelopmentText], list[DevelopmentText]]:
    """Draw a share of every skill's texts to judge by: (the others, those held out). At least one text is left."""
    mixed = interleaved(texts, lambda text: text.skill, seed)
    held = min(round(len(mixed) * share), len(mixed) - 1)
    return mixed[held:], mixed[:held]


def draw(
    texts: Sequence[DevelopmentText], size: Callable[[DevelopmentText], int], most: int, seed: int
) -> list[DevelopmentText]:
    """Draw texts whose sizes add up to `most` at most, but one at the least: all, where they fit, else of every skill
    its share."""
    if sum(map(size, texts)) <= most:
        return list(texts)
    drawn: list[DevelopmentText] = []
    for text in interleaved(texts, lambda text: text.skill, seed):
        most -= size(text)
        if drawn and most < 0:
            break
        drawn.append(text)
    return drawn


def interleaved(items: Sequence[Item], group: Callable[[Item], str], seed: int) -> list[Item]:
    """Put items in a random order, every beginning of it with each group in proportion, to one item."""
    groups: dict[str, list[Item]] = {}
    for item in items:
        groups.setdefault(group(item), []).append(item)
    generator = random.Random(seed)
    placed: list[tuple[float, float, Item]] = []
    for members in groups.values():
        generator.shuffle(members)
        placed += [((n + 0.5) / len(members), generator.random(), item) for n, item in enumerate(members)]
    return [item for _, _, item in sorted(placed, key=lambda place: place[:2])]
