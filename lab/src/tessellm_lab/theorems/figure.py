"""The picture of `theorems`: projective gap against ε and k with its bound; particles on the counter-example."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..common.panels import COLOURS, FAINT, INK, caption, panels, save

SHOWN_EPSILON, SHOWN_EXPERTS = 0.1, (2, 4, 8)


def draw(out: Path, sweep: Sequence[Mapping[str, Any]], approach: Sequence[Mapping[str, float]]) -> str:
    figure, (left, middle, right) = panels(3)
    _against_epsilon(left, sweep)
    _against_experts(middle, sweep)
    _counter_example(right, approach)
    return save(figure, out, "theorems")


def _line(sweep: Sequence[Mapping[str, Any]], x: str, y: str, **where: Any) -> tuple[list[float], list[float]]:
    rows = [row for row in sweep if all(row[key] == value for key, value in where.items())]
    return [row[x] for row in rows], [row[y] for row in rows]


def _against_epsilon(ax: Any, sweep: Sequence[Mapping[str, Any]]) -> None:
    for colour, k in zip(COLOURS, SHOWN_EXPERTS, strict=False):
        ax.plot(
            *_line(sweep, "epsilon", "gap", experts=k, noise="aligned"), "o-", ms=3.5, color=colour, label=f"k = {k}"
        )
        ax.plot(*_line(sweep, "epsilon", "bound", experts=k, noise="aligned"), "--", lw=1, color=colour)
    ax.plot([], [], "--", lw=1, color=INK, label="bound")
    ax.set(xscale="log", yscale="log")
    ax.legend(fontsize=8, frameon=False)
    caption(ax, "Idle experts within ε of the base: what is lost", "ε (nats)", "projective gap (total variation)")


def _against_experts(ax: Any, sweep: Sequence[Mapping[str, Any]]) -> None:
    for colour, noise in zip(COLOURS, ("aligned", "independent"), strict=False):
        where = {"epsilon": SHOWN_EPSILON, "noise": noise}
        ax.plot(*_line(sweep, "experts", "gap", **where), "o-", ms=3.5, color=colour, label=f"{noise} noise, marginal")
        xy = _line(sweep, "experts", "total_variation", **where)
        ax.plot(*xy, "s:", ms=3, color=colour, label=f"{noise} noise, whole sequence")
    ax.plot(
        *_line(sweep, "experts", "bound", epsilon=SHOWN_EPSILON, noise="aligned"), "--", lw=1, color=INK, label="bound"
    )
    ax.set(yscale="log", xscale="log", xticks=[2, 3, 4, 6, 8], xticklabels=["2", "3", "4", "6", "8"])
    ax.minorticks_off()
    ax.set_ylim(bottom=1.5e-3)
    ax.legend(fontsize=8, frameon=False, loc="lower right")
    caption(ax, f"The same at ε = {SHOWN_EPSILON}: why k matters", "experts k", "total variation")


def _counter_example(ax: Any, approach: Sequence[Mapping[str, float]]) -> None:
    counts = [row["particles"] for row in approach]
    for colour, feature, name in zip(COLOURS, ("f1", "f2"), ("f₁ = x₁⊕x₂", "f₂ = x₂"), strict=False):
        ax.plot(counts, [row[feature] for row in approach], "o-", ms=3.5, color=colour, label=f"particles, {name}")
    ax.axhline(0.9, color=INK, lw=1, ls="--")
    ax.axhline(0.744, color=FAINT, lw=1.5)
    ax.text(counts[-1], 0.902, "C", fontsize=9, ha="right", va="bottom", color=INK)
    ax.text(counts[-1], 0.746, "Eq. 2, step by step", fontsize=9, ha="right", va="bottom", color=INK)
    ax.set(xscale="log", ylim=(0.5, 1.0))
    ax.legend(fontsize=8, frameon=False, loc="lower right", bbox_to_anchor=(1, 0.08))
    caption(ax, "Two bits: Eq. 2 is not C; particles converge to C", "particles N", "P(feature = 1)")
