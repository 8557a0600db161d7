"""Routes of labelled prompts, counted: accuracy, base retention, and which member was selected in place of another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import PromptError, nearest, require
from ..files import write_figure
from ..routing.route import BASE, Route
from ..text.inputs import LabelledPrompt


@dataclass(frozen=True)
class Confusion:
    """How often each member was selected for the prompts of each label."""

    members: tuple[str, ...]
    counts: Counter[tuple[str, str]]  # (label, selected)

    @classmethod
    def of(cls, members: Sequence[str], labels: Sequence[str], routes: Sequence[Route]) -> Confusion:
        pairs = zip(labels, (route.selected for route in routes), strict=True)
        return cls(tuple(members), Counter(pairs))

    @property
    def labels(self) -> list[str]:
        return [name for name in self.members if any(label == name for label, _ in self.counts)]

    @property
    def accuracy(self) -> float | None:
        """The share of the experts' prompts that the right expert gets; None without such prompts."""
        return self._right([name for name in self.labels if name != BASE])

    @property
    def base_retention(self) -> float | None:
        """The share of the base's prompts that it keeps; None without such prompts."""
        return self._right([name for name in self.labels if name == BASE])

    def total(self, label: str) -> int:
        return sum(count for (own, _), count in self.counts.items() if own == label)

    def errors(self) -> list[tuple[str, str, int]]:
        """Return (label, selected, count) of wrong selections, the most frequent first."""
        wrong = [(*pair, count) for pair, count in self.counts.items() if pair[0] != pair[1]]
        return sorted(wrong, key=lambda each: (-each[2], each[0], each[1]))

    def _right(self, labels: Sequence[str]) -> float | None:
        total = sum(self.total(label) for label in labels)
        return sum(self.counts[label, label] for label in labels) / total if total else None


def checked_labels(prompts: Sequence[LabelledPrompt], members: Sequence[str]) -> list[str]:
    """Return the labels of prompts that all have one; refuse those of no member."""
    for prompt in prompts:
        if prompt.label is None:
            raise PromptError(f"{prompt.where} has no label, which others have. Expected a key skill or label in all")
        if prompt.label not in members:
            raise PromptError(f"{prompt.where}: there is no member {prompt.label!r}; {nearest(prompt.label, members)}")
    return [str(prompt.label) for prompt in prompts]


def route_entry(prompt: LabelledPrompt, route: Route) -> dict[str, Any]:
    """Return what --json holds of a prompt. A score is null where the floor was not reached."""
    entry: dict[str, Any] = {"prompt": prompt.prompt} | ({} if prompt.label is None else {"label": prompt.label})
    return entry | {
        "selected": route.selected,
        "prior": dict(route.prior),
        "scores": dict(route.scores),
        "threshold": route.threshold,
    }


def draw(confusion: Confusion, path: Path) -> None:
    """Draw the confusion matrix, rows normalised, in the format that the file's name ends with."""
    require("matplotlib", "plots")
    from matplotlib.figure import Figure

    rows, columns = confusion.labels, confusion.members
    shares = [[confusion.counts[row, column] / confusion.total(row) for column in columns] for row in rows]
    size = 2 + 0.35 * len(columns)
    figure = Figure(figsize=(size, max(2.5, 1.5 + 0.35 * len(rows))), layout="constrained")
    axes = figure.subplots()
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    axes.set_xticks(range(len(columns)), columns, rotation=90)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_xlabel("selected")
    axes.set_ylabel("label")
    for y, row in enumerate(rows):
        for x, column in enumerate(columns):
            if count := confusion.counts[row, column]:
                colour = "white" if shares[y][x] > 0.5 else "black"
                axes.text(x, y, str(count), ha="center", va="center", fontsize=8, color=colour)
    write_figure(figure, path)
