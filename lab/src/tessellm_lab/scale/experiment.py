"""`reproduce scale`: held-out score against tasks, width, depth, encoding and support; linear decodability beside it.

After arXiv 2507.07207. At full size one call trains for at most nine minutes and goes on in the next: `OUT/scale-state`
holds what is done (see `stages` and `state`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from tessellm.files import going_on

from ..common.claims import Claim, Result
from ..common.correlation import correlation
from ..common.panels import drawn
from .figure import draw
from .stacks import stacks
from .stages import train_stacks

Row = dict[str, Any]
Log = Callable[[str], None]
MINUTES = 9.0
LEARNED = {"identity": 0.95, "orthogonal": 0.95, "language": 0.95, "invertible": 0.90, "interval_shuffle": 0.90}


def run(seed: int, out: Path, size: str, log: Log = print, minutes: float = MINUTES) -> Result:
    """Train what is not trained yet, then write `scale.json` and `scale.png`."""
    full = size == "full"
    folder = out / "scale-state" if full else out / ".scale-state"
    wanted = stacks(size, seed)
    torch.set_float32_matmul_precision("highest")
    deadline = time.monotonic() + 60 * minutes if full else float("inf")
    with going_on(folder):
        state = train_stacks(wanted, folder, "cuda" if full else "cpu", deadline, log)
    done = [rows for stack in wanted if (rows := state.rows(stack)) is not None]
    rows = [row for part in done for row in part]
    claims = [finished(len(done), len(wanted)), *claims_of(rows, full)]
    enough = any(stack.name == "reference" and state.rows(stack) for stack in wanted)  # for every panel
    figures = drawn(lambda: draw(rows, out)) if enough else []
    under_way = {name: {"step": found["step"], "curve": found["curve"]} for name, found in state.stopped.items()}
    if full:
        state.write()
    else:
        _remove(folder)
    tables = {"runs": rows, "under_way": under_way, "broken": state.broken}
    return Result("scale", claims, seed, size, state.stopwatch.seconds, figures, tables)


def _remove(folder: Path) -> None:
    for path in (folder / "state.json", *folder.glob("*.safetensors")):
        path.unlink(missing_ok=True)
    with suppress(OSError):  # somebody else's files are in it
        folder.rmdir()


def finished(done: int, wanted: int) -> Claim:
    return Claim("finished", "stacks of runs finished; run again to go on", done, f"{wanted}", done == wanted)


def claims_of(rows: list[Row], full: bool) -> list[Claim]:
    """What the runs show. Targets of the encodings and the correlation are the full size's."""
    teacher = [row for row in rows if row["family"] == "hyperteacher"]
    plain = [row for row in teacher if row["network"] == "mlp" and row["encoding"] == "identity"]
    random = [row for row in plain if row["support"] == "random"]
    quarter = [row for row in random if row["held_out_share"] == 0.25]
    deepest = max((row["depth"] for row in quarter), default=0)
    widest = max((row["width"] for row in quarter), default=0)
    claims = encodings_of(teacher, full)
    claims += trend("width", "width", [row for row in quarter if row["depth"] == deepest and not row["curve"]])
    short = [row for row in random if row["width"] == widest and row["depth"] == deepest and not row["curve"]]
    claims += trend("tasks", "tasks", short)
    claims += trend("depth", "depth", [row for row in quarter if row["width"] == widest and not row["curve"]])
    reference = mean([row for row in short if row["held_out_share"] == 0.25])
    for support in ("equal", "popular", "unpopular", "disconnected", "non_compositional"):
        chosen = [row for row in plain if row["support"] == support]
        if chosen and reference is not None:
            value = round(reference - score(chosen[0]), 4)
            fails = support in ("disconnected", "non_compositional")
            text = f"{support}: held-out R² below that of a random support"
            claims.append(Claim(support, text, value, "≥ 0.1" if fails else None, value >= 0.1 if fails else None))
    claims += correlations(teacher, full)
    grid = [row for row in rows if row["family"] == "grid"]
    wide = [row for row in grid if row["width"] == max(other["width"] for other in grid)]
    claims += trend("grid-tasks", "tasks", wide, "preference grid: ")
    claims += trend("grid-width", "width", [row for row in grid if row["held_out_share"] == 0.25], "preference grid: ")
    return claims


def score(row: Row) -> float:
    return row["held_out"]["score"]


def mean(rows: list[Row]) -> float | None:
    return sum(map(score, rows)) / len(rows) if rows else None


def encodings_of(rows: list[Row], full: bool) -> list[Claim]:
    """The longest-trained run of each encoding on a random support with a quarter held out, widest network."""
    claims = []
    for name in (*LEARNED, "fewshot"):
        chosen = [r for r in rows if r["encoding"] == name and r["support"] == "random" and r["network"] == "mlp"]
        chosen = [r for r in chosen if r["held_out_share"] == 0.25]
        if chosen:
            best = max(chosen, key=lambda row: (row["steps"], row["width"], row["depth"]))
            goal = LEARNED.get(name) if full else None
            text = f"{name}: held-out R² after {best['steps']} steps"
            holds = None if goal is None else score(best) >= goal
            claims.append(Claim(name, text, score(best), None if goal is None else f"≥ {goal}", holds))
    return claims


def trend(name: str, key: str, rows: list[Row], prefix: str = "") -> list[Claim]:
    """The largest fall of the mean from one value to the next, against how much seeds differ at one value."""
    cells: dict[float, list[float]] = {}
    for row in rows:
        cells.setdefault(row[key], []).append(score(row))
    if len(cells) < 2:
        return []
    ordered = [cells[value] for value in sorted(cells)]
    means = [sum(cell) / len(cell) for cell in ordered]
    fall = max(before - after for before, after in pairwise(means))
    noise = max(max(cell) - min(cell) for cell in ordered)
    rise = f"{means[0]:.3f} → {means[-1]:.3f} over {sorted(cells)[0]}–{sorted(cells)[-1]}"
    text = f"{prefix}held-out score against {key} ({rise}): largest fall between neighbours"
    several = any(len(cell) > 1 for cell in ordered)
    holds = means[-1] > means[0] and fall <= max(noise, 0.0) if several else None
    return [Claim(f"{name}-trend", text, round(fall, 4), f"≤ seed noise {noise:.3f}" if several else None, holds)]


def correlations(rows: list[Row], full: bool) -> list[Claim]:
    """Held-out R² against held-out decodability of the last hidden layer, without the runs that were trained ten times
    as long; beside it, with those."""
    every = [row for row in rows if not row["absent"]]
    whole = [row for row in every if not row["curve"]]
    if len(whole) < 4:
        return []
    found = _correlated(whole)
    runs = f"{len(whole)} runs of at most {max(row['steps'] for row in whole):,} updates, every module trained"
    text = f"correlation of held-out R² and decodability, {runs}"
    holds = found["pearson"] >= 0.9 and len(whole) >= 30 if full else None
    target = "≥ 0.9 over ≥ 30 runs" if full else None
    interval = [round(found["low"], 3), round(found["high"], 3)]
    claims = [
        Claim("correlation", text, round(found["pearson"], 4), target, holds),
        Claim("correlation-interval", "its 95 % interval (runs drawn anew)", interval),
        Claim("correlation-rank", "the same as a rank correlation", round(found["spearman"], 4)),
    ]
    if len(every) > len(whole):
        text = f"the same over {len(every)} runs, with those that were trained longer"
        claims.append(Claim("correlation-all", text, round(_correlated(every)["pearson"], 4)))
    return claims


def _correlated(rows: list[Row]) -> dict[str, float]:
    return correlation([score(row) for row in rows], [row["decode"]["held_out"] for row in rows])
