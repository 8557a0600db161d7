"""Scores as shares of the expert's, by task and column; and cost against quality, where that was measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tessellm.files import write_figure

from ..common.panels import COLOURS, INK, blank, caption

KINDS = {"base": 5, "rule": 0, "merge": 1, "arrow": 2, "router": 3, "trained": 4}  # colours


def draw(tables: Mapping[str, Any], out: Path) -> str:
    """real.png in `out`, of the first set."""
    name, table = next(iter(tables["sets"].items()))
    tasks = [task for task, cells in table["tasks"].items() if "right" in cells.get(task, {})]
    written = {column for task in tasks for column, cell in table["tasks"][task].items() if "right" in cell}
    columns = [column for column, kind in table["columns"].items() if kind != "expert" and column in written]
    costs = tables["costs"]
    figure = blank(14 if costs else 8, 1.8 + 0.42 * len(columns), dpi=150, facecolor="white", layout="constrained")
    left, *right = figure.subplots(1, 2, width_ratios=(1.35, 1)) if costs else [figure.subplots()]
    _heat(left, table, tasks, columns)
    caption(left, f"{name}: score when writing, as a share of the expert's own", "", "")
    for ax in right:
        _costs(ax, costs, table)
        caption(
            ax, "cost against quality", "milliseconds per token, over the base's", "mean share of the expert's score"
        )
    write_figure(figure, out / "real.png")
    return "real.png"


def _heat(ax: Any, table: Mapping[str, Any], tasks: list[str], columns: list[str]) -> None:
    """A row per column, a tile per task: the share, and the score itself; white where that was not measured."""
    shares = [[_share(table["tasks"][task], task, column) for task in tasks] for column in columns]
    ax.imshow(
        [[min(each, 1.2) for each in row] for row in shares] or [[0]], cmap="viridis", vmin=0, vmax=1.2, aspect="auto"
    )
    for row, column in enumerate(columns):
        for place, task in enumerate(tasks):
            cell = table["tasks"][task].get(column, {})
            text = f"{cell['right']['mean']:.2f}" if "right" in cell else ""
            colour = "white" if shares[row][place] < 0.7 else INK
            ax.text(place, row, text, ha="center", va="center", fontsize=8, color=colour)
    ax.set_xticks(range(len(tasks)), tasks, fontsize=8)
    ax.set_yticks(range(len(columns)), columns, fontsize=8)


def _share(cells: Mapping[str, Any], task: str, column: str) -> float:
    if "right" not in cells.get(column, {}):
        return math.nan
    own = cells[task]["right"]["mean"]
    return cells[column]["right"]["mean"] / own if own else 0.0


def _costs(ax: Any, costs: Mapping[str, Any], table: Mapping[str, Any]) -> None:
    shares = table["mean share of the expert's score"]
    for column, cost in costs.items():
        if column in shares:
            place = cost["ms per token over the base's"], shares[column]
            ax.scatter(*place, color=COLOURS[KINDS[table["columns"][column]]], s=36)
            ax.annotate(column, place, fontsize=7, xytext=(4, 3), textcoords="offset points", color=INK)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(color="#ECEEF1", linewidth=0.8)
    ax.set_axisbelow(True)
    ax.margins(0.18)
    ax.tick_params(labelsize=8)
