"""The scale experiment's figure: what held-out scores depend on, and how decodability goes with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..panels import COLOURS, INK, caption, panels, save
from .tasks import SUPPORTS

Row = dict[str, Any]


def draw(rows: list[Row], out: Path) -> str:
    """Five panels: tasks, width and depth, supports, encodings, decodability."""
    figure, axes = panels(5, width=3.5)
    teacher = [row for row in rows if row["family"] == "hyperteacher" and row["network"] == "mlp"]
    swept = [row for row in teacher if not row["curve"]]
    plain = [row for row in swept if row["encoding"] == "identity"]
    widest, deepest = max(row["width"] for row in plain), max(row["depth"] for row in plain)
    random = [row for row in plain if row["support"] == "random"]
    quarter = [row for row in random if row["held_out_share"] == 0.25]
    reference = [row for row in random if row["width"] == widest and row["depth"] == deepest]
    _against(axes[0], reference, "tasks", "teacher", 0)
    grid = [row for row in rows if row["family"] == "grid"]
    if grid:
        _against(axes[0], [r for r in grid if r["width"] == max(g["width"] for g in grid)], "tasks", "grid", 1)
    caption(axes[0], "More combinations trained on", "combinations in training", "held-out score")
    _against(axes[1], [row for row in quarter if row["depth"] == deepest], "width", f"teacher, depth {deepest}", 0)
    if grid:
        _against(axes[1], [r for r in grid if r["held_out_share"] == 0.25], "width", "grid", 1)
    shallow = [row for row in quarter if row["width"] == widest and row["depth"] < deepest]
    for row in shallow:
        axes[1].scatter(row["width"], row["held_out"]["score"], marker="x", color=COLOURS[2])
    for depth, row in {row["depth"]: row for row in shallow}.items():
        place = (row["width"], row["held_out"]["score"])
        axes[1].annotate(f"depth {depth}  ", place, fontsize=6, color=INK, ha="right", va="center")
    axes[1].set_xscale("log", base=2)
    caption(axes[1], "Wider, deeper", "width", "held-out score")
    by_support = [(name, [r for r in reference + plain if r["support"] == name]) for name in SUPPORTS]
    by_support = [(n, [r for r in found if r["held_out_share"] == 0.25]) for n, found in by_support]
    _bars(axes[2], [(name, found[0]) for name, found in by_support if found])
    caption(axes[2], "What training covers", "held-out R² (decodability hollow)", "")
    best = {row["encoding"]: row for row in sorted(teacher, key=lambda r: (r["steps"], r["width"], r["depth"]))
            if row["support"] == "random" and row["held_out_share"] == 0.25}  # fmt: skip
    if any(row["curve"] for row in best.values()):
        for number, (name, row) in enumerate(best.items()):
            thousands = [step / 1000 for step, _ in row["curve"]]
            missing = [1 - held_out for _, held_out in row["curve"]]
            label = name.replace("_", " ")
            axes[3].plot(thousands, missing, color=COLOURS[number % len(COLOURS)], label=label)
        axes[3].set_yscale("log")
        axes[3].legend(fontsize=6)
        caption(axes[3], "How the task is told, over training", "thousands of updates", "1 − held-out R²")
    else:
        _bars(axes[3], list(best.items()))
        caption(axes[3], "How the task is told", "held-out R² (decodability hollow)", "")
    whole = [row for row in rows if row["family"] == "hyperteacher" and not row["absent"]]
    short = [row for row in whole if not row["curve"]]
    groups = {network: [row for row in short if row["network"] == network] for network in ("mlp", "transformer")}
    if len(short) < len(whole):
        groups["mlp, trained longer"] = [row for row in whole if row["curve"]]
    for number, (label, chosen) in enumerate(groups.items()):
        x, y = [r["decode"]["held_out"] for r in chosen], [r["held_out"]["score"] for r in chosen]
        axes[4].scatter(x, y, s=14, color=COLOURS[number], alpha=0.7, label=label)
    axes[4].legend(fontsize=7)
    caption(axes[4], "Decodability goes with it", "held-out decodability, last hidden layer", "held-out R²")
    return save(figure, out, "scale")


def _against(ax: Any, rows: list[Row], key: str, label: str, colour: int) -> None:
    values = sorted({row[key] for row in rows})
    means = []
    for value in values:
        cell = [row["held_out"]["score"] for row in rows if row[key] == value]
        ax.scatter([value] * len(cell), cell, s=10, color=COLOURS[colour], alpha=0.6)
        means.append(sum(cell) / len(cell))
    ax.plot(values, means, color=COLOURS[colour], label=label)
    ax.legend(fontsize=7)


def _bars(ax: Any, named: list[tuple[str, Row]]) -> None:
    for place, (_, row) in enumerate(reversed(named)):
        ax.barh(place, max(row["held_out"]["score"], 0), color=COLOURS[0], height=0.6)
        ax.plot(max(row["decode"]["held_out"], 0), place, "o", color=COLOURS[1], fillstyle="none", markersize=5)
    ax.set_yticks(range(len(named)), [name.replace("_", " ") for name, _ in reversed(named)], fontsize=7)
    ax.set_xlim(0, 1.02)
