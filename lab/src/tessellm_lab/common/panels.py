"""Figures of a few panels side by side, in one look. matplotlib is imported when a picture is drawn."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tessellm.errors import MissingExtraError, require
from tessellm.files import write_figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito
INK, FAINT = "#22262E", "#9AA0AA"


def drawn(draw: Callable[[], str]) -> list[str]:
    """The picture's file name; nothing but a note where matplotlib is missing: results are worth having without it."""
    try:
        return [draw()]
    except MissingExtraError as error:
        print(f"no picture: {error}", file=sys.stderr)
        return []


def blank(width: float, height: float, **options: Any) -> Any:
    """An empty figure, in inches."""
    require("matplotlib", "plots")
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), **options)


def panels(count: int, width: float = 4.6, height: float = 3.7, rows: int = 1) -> tuple[Any, list[Any]]:
    """An empty figure and its axes, `count` in each row."""
    figure = blank(width * count, height * rows, dpi=150, facecolor="white", layout="constrained")
    axes = list(figure.subplots(rows, count, squeeze=False).flat)
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(color="#ECEEF1", linewidth=0.8)
        ax.set_axisbelow(True)
        ax.tick_params(labelsize=8, colors=INK)
    return figure, axes


def caption(ax: Any, title: str, x: str, y: str) -> None:
    ax.set_title(title, fontsize=9.5, loc="left", color=INK)
    ax.set_xlabel(x, fontsize=9, color=INK)
    ax.set_ylabel(y, fontsize=9, color=INK)


def save(figure: Any, out: Path, name: str) -> str:
    """NAME.png in `out`; the file's name is what a result lists."""
    write_figure(figure, out / f"{name}.png")
    return f"{name}.png"
