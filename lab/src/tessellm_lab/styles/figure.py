"""The picture of `styles`: texts as letters (content) on colours (style), the broken bijection, and the future."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ..common.panels import COLOURS, INK, caption, panels, save
from .members import Walk

TINTS = ("#9CC9E3", "#F4B183", "#8FD0B6", "#E3B8D2")
ROWS = ("base", "content expert", "style expert", "composed")


def draw(
    out: Path,
    walk: Walk,
    example: Mapping[str, Tensor],
    broken: Sequence[Mapping[str, float]],
    future: Sequence[Mapping[str, Any]],
) -> str:
    figure, (left, middle, right) = panels(3)
    _texts(left, walk, example)
    _broken(middle, broken)
    _future(right, future)
    return save(figure, out, "styles")


def _texts(ax: Any, walk: Walk, example: Mapping[str, Tensor]) -> None:
    from matplotlib.patches import Rectangle

    content_V, style_V = walk.features
    for row, name in enumerate(ROWS):
        for t, token in enumerate(example[name].tolist()):
            tint = TINTS[int(style_V[token])]
            ax.add_patch(Rectangle((t, -row), 0.94, 0.8, facecolor=tint, alpha=1.0 if t > 1 else 0.35))
            letter = "ABCDEF"[int(content_V[token])]
            ax.text(t + 0.47, -row + 0.38, letter, ha="center", va="center", fontsize=8, color=INK)
    length = len(example["base"])
    ax.set(xlim=(-0.2, length + 0.2), ylim=(-len(ROWS) + 0.4, 1.4), xticks=[])
    ax.set_yticks([0.4 - row for row in range(len(ROWS))], ROWS, fontsize=8)
    ax.grid(False)
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    caption(
        ax, "Letter: content. Colour: style. Each pair is one token", "greedy, after the same two tokens (pale)", ""
    )


def _broken(ax: Any, broken: Sequence[Mapping[str, float]]) -> None:
    share = [100 * row["share"] for row in broken]
    lines = {"style expert alone, its own task": "style expert alone", "composed: right content": "content"}
    lines |= {"composed: right style": "style", "composed: both": "both"}
    for colour, (label, key) in zip((COLOURS[4], COLOURS[0], COLOURS[1], COLOURS[2]), lines.items(), strict=True):
        ax.plot(share, [100 * row[key] for row in broken], "o-", ms=3.5, color=colour, label=label)
    ax.set_ylim(0, 105)
    ax.legend(fontsize=8, frameon=False, loc="lower left")
    caption(ax, "The bijection broken", "% of tokens with another pairing for the style expert", "% of tokens")


def _future(ax: Any, future: Sequence[Mapping[str, Any]]) -> None:
    names = [row["model"] for row in future]
    for offset, colour, feature in ((-0.2, COLOURS[0], "content"), (0.2, COLOURS[1], "style")):
        heights = [100 * row[feature] for row in future]
        ax.bar([n + offset for n in range(len(names))], heights, 0.38, color=colour, label=feature)
    ax.set_xticks(
        range(len(names)), [name.replace(" expert", "\nexpert").replace(", ", ",\n") for name in names], fontsize=8
    )
    ax.grid(False, axis="x")
    ax.set_ylim(0, 105)
    ax.legend(fontsize=8, frameon=False, loc="upper left")
    caption(ax, "Features that need the future: Eq. 2 is not C", "", "% of features kept")
