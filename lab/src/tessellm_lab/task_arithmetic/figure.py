"""The picture of `task-arithmetic`: strings right, distances and interference, as fine-tuning goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..common.panels import COLOURS, INK, caption, panels, save

Table = Sequence[Mapping[str, Any]]


def draw(out: Path, table: Table) -> str:
    figure, (left, middle, right) = panels(3)
    few, many = (pick({row["experts"] for row in table}) for pick in (min, max))
    for experts, style in ((few, "--"), (many, "-")):
        for colour, who in ((COLOURS[0], "composed"), (COLOURS[1], "merged")):
            label = f"{who}, k = {experts}"
            _line(left, table, experts, who, 100.0, ls=style, color=colour, label=label)
    _line(left, table, many, "ideal", 100.0, ls=":", color=INK, label="the owner alone")
    left.set_ylim(0, 105)
    caption(left, "Disjoint skills: composing or merging", "steps of fine-tuning", "% of strings wholly right")

    lines = {"merged – ideal (disentanglement)": "disentanglement error", "composed – ideal": "composed against ideal"}
    lines |= {"merged – composed": "merged against composed", "Definition 4": "definition 4, total variation"}
    for colour, (label, key) in zip((COLOURS[1], COLOURS[0], COLOURS[4], COLOURS[2]), lines.items(), strict=True):
        _line(middle, table, many, key, color=colour, label=label)
    middle.set_yscale("log")
    caption(middle, f"Distances, k = {many}", "steps of fine-tuning", "mean total variation")

    _line(right, table, many, "mean |log Z|", color=COLOURS[0], label="mean |log Z| of Eq. 2")
    _line(right, table, many, "definition 4, nats", color=COLOURS[2], label="Definition 4: second sup log-ratio")
    caption(right, f"The tails, k = {many}: what total variation does not see", "steps of fine-tuning", "nats")
    for ax in (left, middle, right):
        ax.set_xscale("log")
        ax.legend(fontsize=8, edgecolor="none", framealpha=0.85)
    return save(figure, out, "task-arithmetic")


def _line(ax: Any, table: Table, experts: int, key: str, scale: float = 1.0, **look: Any) -> None:
    rows = [row for row in table if row["experts"] == experts]
    ax.plot([row["age"] for row in rows], [scale * row[key] for row in rows], marker="o", ms=3, **look)
