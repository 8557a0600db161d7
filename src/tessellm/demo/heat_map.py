"""The demo's picture: the posterior where each answer begins, and along each answer.

It knows texts and numbers, no models. matplotlib is imported when a picture is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..diagnose.shown import PALETTE
from ..errors import require
from ..files import write_figure
from .answers import DemoAnswer
from .shown import ending

BASE = FAINT = "#9AA0AA"
INK = "#22262E"
LABEL = 44  # characters of a prompt


def save_heat_map(path: Path, answers: Sequence[DemoAnswer], members: Sequence[str]) -> None:
    """Draw prompts × members at the left, prompts × tokens at the right, where a cell mixes the members' colours."""
    require("matplotlib", "plots")
    from matplotlib.figure import Figure

    figure = Figure((15, 1.6 + 0.42 * len(answers)), dpi=110, facecolor="white", layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(len(members), 2.6 * len(members)))
    _first_tokens(left, answers, members)
    _along_answers(right, answers, members)
    for axes in (left, right):
        axes.tick_params(labelsize=9, colors=INK, length=0)
        axes.spines[:].set_visible(False)
    write_figure(figure, path)


def _first_tokens(axes: Any, answers: Sequence[DemoAnswer], members: Sequence[str]) -> None:
    axes.imshow([answer.share_TM[0] for answer in answers], cmap="Blues", vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(len(members)), members)
    axes.set_yticks(range(len(answers)), [ending(answer.asked.prompt, LABEL) for answer in answers])
    axes.set_title("posterior where the answer begins", fontsize=10, loc="left", color=INK)
    for y, answer in enumerate(answers):
        for x, share in enumerate(answer.share_TM[0]):
            ink = "white" if share > 0.5 else INK if share >= 0.005 else FAINT
            axes.text(x, y, f"{share:.2f}".lstrip("0"), ha="center", va="center", fontsize=8, color=ink)


def _along_answers(axes: Any, answers: Sequence[DemoAnswer], members: Sequence[str]) -> None:
    from matplotlib.colors import to_rgb

    colours = [to_rgb(each) for each in (BASE, *(PALETTE[n % len(PALETTE)] for n in range(len(members) - 1)))]
    longest = max(len(answer.share_TM) for answer in answers)
    axes.imshow([_mixed(answer, colours, longest) for answer in answers], aspect="auto", interpolation="nearest")
    axes.set_yticks([])
    axes.set_xlabel("token of the answer", fontsize=9, color=INK)
    axes.set_title("posterior along the answer", fontsize=10, loc="left", color=INK)
    for name, rgb in zip(members, colours, strict=True):
        axes.plot([], [], "s", color=rgb, label=name, markersize=8)
    where = {"loc": "lower right", "bbox_to_anchor": (1, 1), "borderaxespad": 0.1}
    axes.legend(ncols=len(members), fontsize=9, frameon=False, handletextpad=0.1, columnspacing=1, **where)


def _mixed(answer: DemoAnswer, colours: Sequence[tuple[float, float, float]], length: int) -> list[list[float]]:
    """A row of colours, white behind the end."""
    cells = [
        [sum(share * rgb[c] for share, rgb in zip(share_M, colours, strict=True)) for c in range(3)]
        for share_M in answer.share_TM
    ]
    cells = [[min(1.0, max(0.0, value)) for value in cell] for cell in cells]
    return cells + [[1.0, 1.0, 1.0]] * (length - len(cells))
