"""The demo's picture: one composed generation as rows of letter tiles, each coloured by its owner.

It knows strings and numbers, no models. matplotlib is imported when a picture is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tessellm.files import write_figure

from ..common.panels import blank
from .letters import END_OF_PROMPT

EXPERT_COLOURS = ("#0072B2", "#D55E00", "#009E73")  # Okabe and Ito: told apart by colour-blind readers, too
GREY, BAND, INK, FAINT = "#E1E4E9", "#F3F4F7", "#22262E", "#6B7280"
OWNED = 0.05  # nats: below, a token is nobody's
LABEL_WIDTH = 3.3
TOP = -1.35
BAR_HEIGHT = 0.5


def save_figure(
    path: Path,
    string: str,
    base: str,
    experts: Mapping[str, str],
    composed: str,
    kl_KT: Sequence[Sequence[float]],
) -> None:
    """Draws the input, what each member alone makes of it, the composition's answer, and KL(p_i‖p_b) below."""
    columns = max(map(len, (string, base, composed, *experts.values()))) + 1
    right, bottom = LABEL_WIDTH + columns + 1.6, 5.1 + 1.85 * len(experts)
    figure = blank(16, 16 * (bottom - TOP) / right, dpi=100, facecolor="white")
    axes: Any = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, right), ylim=(bottom, TOP), aspect="equal")
    axes.axis("off")
    _title(axes, right, len(experts))

    y = 0.95
    _row(axes, y, "input", string + END_OF_PROMPT, [])
    y += 1.4
    _row(axes, y, "base alone", base, [], end=True)
    for number, (label, answer) in enumerate(experts.items()):
        y += 1.1
        changed = [EXPERT_COLOURS[number] if a != b else None for a, b in zip(answer, string, strict=False)]
        _row(axes, y, f"{label} alone", answer, changed, end=True, colour=EXPERT_COLOURS[number])
    y += 1.45
    _band(axes, y, columns)
    _row(axes, y, "composed", composed, owners(kl_KT), end=True, weight="bold")
    _strips(axes, y + 1.5, list(experts), kl_KT)
    write_figure(figure, path)


def owners(kl_KT: Sequence[Sequence[float]]) -> list[str | None]:
    """The colour of the expert that differs most from the base at each token; None where nobody does."""
    colours: list[str | None] = []
    for kl_K in zip(*kl_KT, strict=True):
        owner = max(range(len(kl_K)), key=kl_K.__getitem__)
        colours.append(EXPERT_COLOURS[owner] if kl_K[owner] > OWNED else None)
    return colours


def _title(axes: Any, right: float, experts: int) -> None:
    terms = " + ".join(rf"\log p_{{{i}}}" for i in range(1, experts + 1))
    equation = rf"$\log\,\hat p \;=\; {terms} \;-\; {experts - 1}\,\log p_b \;-\; \log Z$"
    axes.text(right / 2, -0.75, equation, fontsize=30, ha="center", va="center", color=INK)
    caption = "every expert speaks where it differs from the base; a composed letter has the colour of its owner"
    axes.text(right / 2, -0.05, caption, fontsize=16, ha="center", va="center", color=FAINT)


def _band(axes: Any, y: float, columns: int) -> None:
    from matplotlib.patches import FancyBboxPatch

    shape = "round,pad=0,rounding_size=0.18"
    box = FancyBboxPatch((0.3, y - 0.62), LABEL_WIDTH + columns - 0.2, 1.24, boxstyle=shape, zorder=0)
    box.set(facecolor=BAND, edgecolor="none")
    axes.add_patch(box)


def _row(
    axes: Any,
    y: float,
    label: str,
    letters: str,
    colours: Sequence[str | None],
    end: bool = False,
    colour: str = INK,
    weight: str = "normal",
) -> None:
    axes.text(LABEL_WIDTH - 0.3, y, label, fontsize=19, ha="right", va="center", color=colour, weight=weight)
    for t, letter in enumerate(letters):
        _tile(axes, t, y, letter, colours[t] if t < len(colours) else None)
    if end:
        axes.text(LABEL_WIDTH + len(letters) + 0.5, y, "end", fontsize=14, ha="center", va="center", color=FAINT)


def _tile(axes: Any, t: int, y: float, letter: str, colour: str | None) -> None:
    from matplotlib.patches import FancyBboxPatch

    corner = (LABEL_WIDTH + t + 0.09, y - 0.41)
    shape = "round,pad=0,rounding_size=0.13"
    axes.add_patch(FancyBboxPatch(corner, 0.82, 0.82, boxstyle=shape, facecolor=colour or GREY, edgecolor="none"))
    ink = "white" if colour else FAINT if letter == " " else INK
    style = {"fontsize": 27, "family": "monospace", "weight": "bold", "color": ink}
    # Capitals stand on a common line, so that they align along a row.
    axes.text(LABEL_WIDTH + t + 0.5, y + 0.145, letter.replace(" ", "␣"), ha="center", va="baseline", **style)


def _strips(axes: Any, y: float, labels: Sequence[str], kl_KT: Sequence[Sequence[float]]) -> None:
    """A row of bars for each expert; all rows have one scale."""
    from matplotlib.patches import Rectangle

    largest, columns = max(max(kl_T) for kl_T in kl_KT), len(kl_KT[0])
    for number, (label, kl_T) in enumerate(zip(labels, kl_KT, strict=True)):
        colour, floor = EXPERT_COLOURS[number], y + 0.75 * number
        text = rf"$\mathrm{{KL}}(p_{{{number + 1}}}\,\|\,p_b)$   {label}"
        axes.text(LABEL_WIDTH - 0.3, floor - 0.2, text, fontsize=14, ha="right", va="center", color=colour)
        axes.plot((LABEL_WIDTH, LABEL_WIDTH + columns), (floor, floor), color=GREY, linewidth=1.5, zorder=0)
        for t, kl in enumerate(kl_T):
            height = BAR_HEIGHT * kl / max(largest, 1e-9)
            axes.add_patch(Rectangle((LABEL_WIDTH + t + 0.09, floor - height), 0.82, height, color=colour, linewidth=0))
        note = f"≤ {max(kl_T):.1f} nats"
        axes.text(LABEL_WIDTH + columns + 0.15, floor - 0.2, note, fontsize=13, ha="left", va="center", color=FAINT)
