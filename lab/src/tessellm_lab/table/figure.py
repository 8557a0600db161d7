"""The table as bars with intervals, a panel a kind of problem."""

from __future__ import annotations

from pathlib import Path

from tessellm.evaluate.intervals import bootstrap

from ..common.panels import COLOURS, FAINT, INK, caption, panels, save
from ..merging.merges import METHODS
from .cells import Pooled
from .models import COMPOSED, EQ2, LORA
from .problems import KINDS

TITLES = {
    "math": "word problems (lm-eval)",
    "code": "functions (evalplus)",
    "mixed": "functions that need a word problem solved",
}


def draw(found: Pooled, out: Path) -> str:
    figure, axes = panels(len(KINDS), width=4.2, height=4.4)
    places = list(range(len(found.columns)))[::-1]
    for ax, kind in zip(axes, KINDS, strict=True):
        for place, column in zip(places, found.columns, strict=True):
            cell = bootstrap(found.scores[kind][column])
            ax.barh(place, cell.mean, color=_colour(column), height=0.72)
            ax.plot([max(0.0, cell.low), min(1.0, cell.high)], [place, place], color=INK, linewidth=1.2)
        ax.set_xlim(0, 1)
        ax.set_yticks(places, found.columns if ax is axes[0] else [""] * len(places), fontsize=8)
        caption(ax, TITLES[kind], "share right", "")
    return save(figure, out, "table")


def _colour(column: str) -> str:
    if column.removeprefix(LORA) in (COMPOSED, EQ2):
        return COLOURS[0]
    return COLOURS[1] if column in METHODS else FAINT
