"""The experiment `letters` (App. C.1): two letter replacements, composed, at every length from 1 to 31, in two forms.

Position-wise with the paper's exact settings, and truly autoregressive. Every seed trains all of its members; seeds run
side by side in one computation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..common.claims import Claim, Result
from ..common.panels import COLOURS, FAINT, caption, drawn, panels, save
from . import positions as positions_form
from . import writing as writing_form
from .positions import LENGTHS, NAMES

Table = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Effort:
    seeds: int
    strings: int  # position-wise training strings a member
    epochs: int
    steps: tuple[int, int]  # autoregressive: the base, each expert
    batch: int
    tested: tuple[int, int]  # strings for each length and seed: position-wise, autoregressive


SIZES = {
    "cpu": Effort(2, 2000, 5, (800, 300), 16, (200, 20)),
    "full": Effort(10, 2000, 5, (1000, 500), 16, (200, 20)),
}


def run(seed: int, out: Path, size: str, log: Callable[[str], None] = print) -> Result:
    """Claims, `letters.json` and `letters.png` in `out`."""
    started, effort = time.perf_counter(), SIZES[size]
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)  # dropout draws from the global generator
    report = lambda epoch, loss_E: log(f"position-wise: epoch {epoch + 1} of {effort.epochs}, loss {loss_E.mean():.4f}")  # noqa: E731
    members = positions_form.train_members(effort.seeds, generator, effort.strings, effort.epochs, report)
    positions = positions_form.evaluate(members, effort.tested[0], generator)
    generator.manual_seed(seed)  # either form can be run again by itself
    log("autoregressive: training, then every length by generate")
    writers = writing_form.train_members(effort.seeds, effort.steps, effort.batch, generator)
    writing = writing_form.evaluate(writers, effort.tested[1], generator)
    claims = [*_claims("position-wise", positions, effort), *_claims("autoregressive", writing, effort)]
    log_z = max(row["log_z"] for row in positions)
    claims.append(Claim("position-wise-log-z", "largest |log Z| of Eq. 2 along the strings (nats)", round(log_z, 3)))
    figures = drawn(lambda: draw(out, positions, writing, effort.seeds))
    tables = {"position-wise": _summary(positions), "autoregressive": _summary(writing)}
    result = Result("letters", claims, seed, size, time.perf_counter() - started, figures, tables)
    result.write(out)
    return result


def _claims(form: str, table: Table, effort: Effort) -> list[Claim]:
    where = f"{form}, worst of lengths 1–31 and {effort.seeds} seeds: share of strings wholly right"
    composed = min(row["composed"] for row in table)
    members = {name: min(row[name] for row in table) for name in NAMES if name != "composed"}
    alone = [row["one expert alone"] for row in table if row["length"] == LENGTHS[-1]]
    return [
        Claim(f"{form}-composed", f"{where}, both replacements", composed, "1.0", composed == 1.0),
        Claim(f"{form}-members", f"{where}, each member at its own task", members),
        Claim(f"{form}-alone", f"{form}, length 31: both replacements by the better expert alone", max(alone)),
    ]


def _summary(table: Table) -> list[dict[str, Any]]:
    """The worst seed at every length."""
    keys = [key for key in table[0] if key not in ("length", "seed")]
    summary = []
    for length in LENGTHS:
        rows = [row for row in table if row["length"] == length]
        worst = {key: (max if key == "log_z" else min)(row[key] for row in rows) for key in keys}
        summary.append({"length": length, **worst})
    return summary


def draw(out: Path, positions: Table, writing: Table, seeds: int) -> str:
    figure, axes = panels(3)
    for ax, table, title in (
        (axes[0], positions, "Position-wise, the paper's settings"),
        (axes[1], writing, "Autoregressive, the stop included"),
    ):
        summary = _summary(table)
        for colour, name in ((COLOURS[2], "composed"), (FAINT, "one expert alone")):
            ax.plot(LENGTHS, [100 * row[name] for row in summary], "o-", ms=3, color=colour, label=name)
        if table is positions:
            ax.axvline(positions_form.TRAINED_LENGTH, color=FAINT, lw=1, ls="--")
            ax.text(positions_form.TRAINED_LENGTH + 0.4, 4, "trained at 16", fontsize=8, color=FAINT)
        ax.set_ylim(0, 105)
        ax.legend(fontsize=8, frameon=False, loc="lower left", bbox_to_anchor=(0, 0.08))
        caption(ax, title, "length of the string", f"% of strings wholly right, worst of {seeds} seeds")
    log_z = [row["log_z"] for row in _summary(positions)]
    axes[2].plot(LENGTHS, log_z, "o-", ms=3, color=COLOURS[1])
    axes[2].set_ylim(0, 1.15 * max(log_z))
    caption(axes[2], "Position-wise: interference of Eq. 2", "length of the string", "largest |log Z| (nats)")
    return save(figure, out, "letters")
