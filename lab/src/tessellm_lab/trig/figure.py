"""The picture of `trig`: one proof, line by line, each word in the colour of the expert that is active there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..common.panels import COLOURS, FAINT, INK, panels, save
from .problems import NAMES
from .proofs import EQUALS

CELL = {"+": 0.7, "(": 0.5, ")": 0.5, "=": 0.9, ".": 0.5}


def draw(out: Path, name: str, prompt: Sequence[str], words: list[str], active: Sequence[Sequence[str]]) -> str:
    """Stopping times over the text: a bar under a word where an expert departs from the base."""
    lines = 2 + words.count(EQUALS)
    figure, (ax,) = panels(1, width=10.5, height=0.8 + 0.42 * lines)
    ax.grid(False)
    ax.spines[:].set_visible(False)
    colour = dict(zip(NAMES, COLOURS, strict=False))
    right = _words(ax, prompt, [None] * len(prompt), 0)
    row, start = 0, 0
    breaks = [n for n, word in enumerate(words) if word == EQUALS]
    for end in (*breaks[1:], len(words)):
        row += 1
        owners = [colour[min(names)] if names else None for names in active[start:end]]
        right = max(right, _words(ax, words[start:end], owners, row))
        start = end
    ax.set(xlim=(0, max(22.0, right + 0.2)), ylim=(-row - 1.6, 0.8), xticks=[], yticks=[])
    for number, identity in enumerate(NAMES):
        ax.text(0.2 + 5.2 * number, -row - 1.2, f"▬ {identity}", color=colour[identity], fontsize=10)
    ax.text(0.2 + 5.2 * len(NAMES), -row - 1.2, "the base writes the rest", color=FAINT, fontsize=10)
    ax.set_title("Who departs from the base: stopping times over a proof", loc="left", fontsize=10.5, color=INK)
    return save(figure, out, name)


def _words(ax: Any, words: Sequence[str], owners: Sequence[str | None], row: int) -> float:
    """One line; hands back where it ends."""
    x = 0.2
    for word, owner in zip(words, owners, strict=True):
        width = CELL.get(word, 0.45 + 0.27 * len(word))
        ax.text(x + width / 2, -row, word, ha="center", va="center", fontsize=10, color=owner or INK)
        if owner:
            ax.plot([x + 0.05, x + width - 0.05], [-row - 0.36] * 2, color=owner, lw=3, solid_capstyle="butt")
        x += width
    return x
