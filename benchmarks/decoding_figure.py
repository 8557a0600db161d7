"""The sweep as a picture: milliseconds per step against what was varied, with the limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tessellm.errors import EngineError, require
from tessellm.files import write_figure

AXES = {"experts": "experts", "batch": "sequences at once", "prompt": "context (tokens)"}
LINES = {
    "ms_a_step": "engine",
    "on_device_ms": "loop on the device",
    "notebook_ms": "notebook loop",
    "limit_ms": "limit",
}
FAR = 5  # times: beyond it, lines are told apart on a logarithmic scale only


def check_format(path: Path) -> None:
    """Refuse a kind of picture that cannot be drawn, before anything is measured."""
    require("matplotlib", "plots")
    from matplotlib.backend_bases import FigureCanvasBase

    known = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.removeprefix(".").lower() not in known:
        raise EngineError(f"{path}: a picture's name ends with one of .{', .'.join(known)}; got {path.suffix!r}")


def draw(result: Mapping[str, Any], path: Path) -> None:
    """One panel for each quantity that takes several values, the others held where most cases have them."""
    require("matplotlib", "plots")
    from matplotlib.figure import Figure

    rows: Sequence[Mapping[str, Any]] = result["rows"]
    common = {axis: max((row[axis] for row in rows), key=[row[axis] for row in rows].count) for axis in AXES}
    panels = []
    for axis in AXES:
        held = [row for row in rows if all(row[other] == common[other] for other in AXES if other != axis)]
        if len({row[axis] for row in held}) > 1:
            panels.append((axis, sorted(held, key=lambda row: row[axis])))
    panels = panels or [("experts", list(rows))]
    figure = Figure(figsize=(4.5 * len(panels), 3.6), layout="constrained")
    for number, (axis, held) in enumerate(panels, 1):
        axes = figure.add_subplot(1, len(panels), number)
        drawn = []
        for key, label in LINES.items():
            points = [(row[axis], row[key]) for row in held if row.get(key) is not None]
            if points:
                style = "k--" if key == "limit_ms" else "o-"
                axes.plot(*zip(*points, strict=True), style, label=label)
                drawn += [milliseconds for _, milliseconds in points]
        axes.set(xlabel=AXES[axis], ylabel="ms a step")
        if max(drawn) > FAR * min(drawn):
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        if axis != "experts":
            axes.set_xscale("log", base=2)
        axes.legend(frameon=False, fontsize=8)
    write_figure(figure, path, dpi=150)
