"""The scale experiment's figure: what held-out scores depend on, and how decodability goes with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..common.panels import COLOURS, caption, panels, save
from .encodings import NAMES
from .tasks import SUPPORTS

Row = dict[str, Any]


def draw(rows: list[Row], out: Path) -> str:
    """Six panels: tasks, width, depth; supports, encodings, decodability."""
    figure, axes = panels(3, width=3.9, height=3.2, rows=2)
    tasks, width, depth, support, encoding, decodability = axes
    teacher = [row for row in rows if row["family"] == "hyperteacher" and row["network"] == "mlp"]
    plain = [row for row in teacher if not row["curve"] and row["encoding"] == "identity"]
    widest, deepest = max(row["width"] for row in plain), max(row["depth"] for row in plain)
    random = [row for row in plain if row["support"] == "random"]
    quarter = [row for row in random if row["held_out_share"] == 0.25]
    reference = [row for row in random if row["width"] == widest and row["depth"] == deepest]
    grid = [row for row in rows if row["family"] == "grid"]
    wide_grid = [row for row in grid if row["width"] == max(other["width"] for other in grid)]
    quarter_grid = [row for row in grid if row["held_out_share"] == 0.25]
    for ax, key, ours, others in (
        (tasks, "tasks", reference, wide_grid),
        (width, "width", [row for row in quarter if row["depth"] == deepest], quarter_grid),
        (depth, "depth", [row for row in quarter if row["width"] == widest], []),
    ):
        _against(ax, ours, key, "teacher (R²)", 0)
        if others:
            _against(ax, others, key, "preference grid (actions right)", 1)
        ax.legend(fontsize=7)
    width.set_xscale("log", base=2)
    width.xaxis.set_major_formatter("{x:g}")
    depth.set_xticks(sorted({row["depth"] for row in quarter}))
    caption(tasks, "More combinations trained on", "combinations in training", "held-out score")
    caption(width, "Wider", "width", "held-out score")
    caption(depth, "Deeper", "hidden layers", "held-out score")
    by_support = [(name, [row for row in reference + plain if row["support"] == name]) for name in SUPPORTS]
    by_support = [(name, [row for row in found if row["held_out_share"] == 0.25]) for name, found in by_support]
    _bars(support, [(name, found[0]) for name, found in by_support if found])
    caption(support, "What training covers", "held-out R² (circle: decodability)", "")
    _told(encoding, [row for row in teacher if row["support"] == "random" and row["held_out_share"] == 0.25])
    _decodable(decodability, [row for row in rows if row["family"] == "hyperteacher" and not row["absent"]])
    return save(figure, out, "scale")


def _told(ax: Any, rows: list[Row]) -> None:
    """Encodings: over training where that was kept, else how it ended."""
    ordered = sorted(rows, key=lambda row: (row["steps"], row["width"], row["depth"]))
    longest = {row["encoding"]: row for row in ordered}
    best = [(name, longest[name]) for name in NAMES if name in longest]
    if not any(row["curve"] for _, row in best):
        _bars(ax, best)
        caption(ax, "How the task is told", "held-out R² (circle: decodability)", "")
        return
    for number, (name, row) in enumerate(best):
        thousands = [step / 1000 for step, _ in row["curve"]]
        missing = [1 - held_out for _, held_out in row["curve"]]
        ax.plot(thousands, missing, color=COLOURS[number], label=name.replace("_", " "))
    ax.set_yscale("log")
    ax.legend(fontsize=7, ncols=2)
    caption(ax, "How the task is told, over training", "thousands of updates", "1 − held-out R²")


def _decodable(ax: Any, rows: list[Row]) -> None:
    short = [row for row in rows if not row["curve"]]
    groups = [
        ("MLP", [row for row in short if row["network"] == "mlp"], 0, "o"),
        ("MLP, trained longer", [row for row in rows if row["curve"]], 2, "s"),
        ("transformer", [row for row in short if row["network"] == "transformer"], 1, "D"),
    ]
    for label, chosen, colour, marker in groups:
        if chosen:
            x, y = [row["decode"]["held_out"] for row in chosen], [row["held_out"]["score"] for row in chosen]
            ax.scatter(x, y, s=16, color=COLOURS[colour], marker=marker, alpha=0.7, label=label)
    ax.legend(fontsize=7)
    caption(ax, "Decodability goes with it", "held-out decodability, last hidden layer", "held-out R²")


def _against(ax: Any, rows: list[Row], key: str, label: str, colour: int) -> None:
    values = sorted({row[key] for row in rows})
    means = []
    for value in values:
        cell = [row["held_out"]["score"] for row in rows if row[key] == value]
        ax.scatter([value] * len(cell), cell, s=10, color=COLOURS[colour], alpha=0.6)
        means.append(sum(cell) / len(cell))
    ax.plot(values, means, color=COLOURS[colour], label=label)


def _bars(ax: Any, named: list[tuple[str, Row]]) -> None:
    for place, (_, row) in enumerate(reversed(named)):
        ax.barh(place, max(row["held_out"]["score"], 0), color=COLOURS[0], height=0.6)
        if not row["absent"]:  # of a module that was never trained nothing is decodable
            ax.plot(max(row["decode"]["held_out"], 0), place, "o", color=COLOURS[1], fillstyle="none", markersize=5)
    ax.set_yticks(range(len(named)), [name.replace("_", " ") for name, _ in reversed(named)], fontsize=7)
    ax.set_xlim(0, 1.02)
