"""The routing table as a picture: seen and unseen wordings, by router and by what it was given."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tessellm.files import write_figure

from ..common.panels import COLOURS, INK, caption, panels
from .columns import OURS

CELLS = {"seen": "wordings of training", "unseen": "other wordings"}


def draw(tables: Mapping[str, Any], out: Path) -> str:
    """routing.png in `out`: a bar per router with its interval."""
    table = tables["twenty"]
    ranked = sorted(table, key=lambda name: (table[name]["family"] != OURS, -table[name]["cells"]["unseen"]["share"]))
    ranked = ranked[::-1]
    figure, axes = panels(2, 6.2, 1.2 + 0.21 * len(ranked))
    for ax, (cell, title) in zip(axes, CELLS.items(), strict=True):
        for place, name in enumerate(ranked):
            entry = table[name]["cells"][cell]
            colour = COLOURS[0] if table[name]["family"] == OURS else COLOURS[1]
            ax.barh(place, entry["share"], color=colour, height=0.7)
            ax.plot([entry["low"], entry["high"]], [place, place], color=INK, linewidth=1)
        ax.set_xlim(0, 1)
        ax.set_yticks(range(len(ranked)), ranked if cell == "seen" else [""] * len(ranked), fontsize=6.5)
        caption(ax, title, "share that reaches the right expert, 95 % of ordinary prompts kept", "")
    write_figure(figure, out / "routing.png")
    return "routing.png"
