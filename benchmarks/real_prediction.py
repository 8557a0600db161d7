"""Does `diagnose` predict, from what a composition of real experts wrote, how much of the experts' score it keeps?

    python benchmarks/real_prediction.py        ten minutes on one core; needs the extra smollm2

Reads the texts that results/real.json and results/real-trainings.json show of each rule (two per task), by the
repository's adapters, and compares two predictions with the shares measured on all prompts: the score that was frozen
on small models, the chance that a whole text is right, and that chance per token, since answers of one task are longer
than those of another. Writes results/real-prediction.json.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import tessellm
from reference_overhead import RESULTS
from tessellm.diagnose.interference import rows_of
from tessellm.diagnose.prompts import Example
from tessellm.diagnose.reading import traced
from tessellm.diagnose.score import chance_per_token, chance_right
from tessellm.experiments.lab.claims import Claim, Result, at_least
from tessellm.experiments.lab.correlation import spearman
from tessellm.experiments.real.columns import STYLED, rule_title
from tessellm.experiments.real.plan import BLENDS, MAIN, SETS
from tessellm.experiments.real.skills import adapters_folder
from tessellm.model import ComposedForCausalLM
from tessellm.text.chat import Chat
from tessellm.text.options import TextOptions

FILES = ("real", "real-trainings")
RULES: dict[str, Any] = {rule_title(rule): rule for rule in ("belief", "evidence", "product")}
RULES[STYLED] = {"name": "belief", "styles": [2]}
BLEND = "one LoRA on the blend"
ENOUGH = 0.8


@dataclass(frozen=True)
class Cell:
    """What a rule wrote for a task, and which share of the score of whoever does it best it was measured to keep."""

    experts: tuple[str, ...]
    task: str
    column: str
    texts: list[Example]
    measured: float


def cells_of(content: dict[str, Any]) -> Iterator[Cell]:
    """The cells of the five, of which shares were measured, and of blends, compared with the trained one."""
    for name, table in content["tables"]["sets"].items():
        for task, cells in table["tasks"].items():
            shown = content["tables"]["texts"].get(name, {}).get(task, [])
            for column in (each for each in RULES if "right" in cells.get(each, {})):
                texts = [Example(each["prompt"], each["texts"][column]) for each in shown if each["texts"].get(column)]
                best = cells[BLEND if name in BLENDS else task]["right"]["mean"] if name in (MAIN, *BLENDS) else 0.0
                if texts and best > 0:
                    share = cells[column]["right"]["mean"] / best
                    yield Cell({**SETS, **BLENDS}[name], task, column, texts, min(1.0, share))


def predict(model: ComposedForCausalLM, cell: Cell) -> dict[str, float]:
    """Both predictions, means over the cell's texts, which are read one by one."""
    options, traces = TextOptions(64, chat=Chat()), []
    for example in cell.texts:
        traces += traced(model, [example], options)
    rows = rows_of(traces)
    return {"frozen": float(chance_right(rows).mean()), "per token": float(chance_per_token(rows).mean())}


def judged(contents: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """One row per cell; a composition is made once for all of its rules."""
    every = [cell for content in contents for cell in cells_of(content)]
    once = {(cell.experts, cell.task, cell.column): cell for cell in reversed(every)}  # the first file's goes before
    made: dict[tuple[str, ...], ComposedForCausalLM] = {}
    for cell in sorted(once.values(), key=lambda cell: (cell.experts, cell.column)):
        if cell.experts not in made:
            folder = adapters_folder()
            experts = {name: str(folder / name) for name in cell.experts}
            made = {cell.experts: tessellm.compose("smollm2", experts, rule="product", dtype="float32")}
        model = made[cell.experts]
        if rule_title(str(model.rule.name)) != cell.column:
            model.set_rule(RULES[cell.column])
        row = {"experts": "+".join(cell.experts), "task": cell.task, "rule": cell.column}
        yield {**row, **predict(model, cell), "measured": cell.measured, "texts": len(cell.texts)}


def claims_of(rows: list[dict[str, Any]]) -> list[Claim]:
    """Over all cells; then over the five alone, of blends no trace shows that a style was asked for."""
    five = [row for row in rows if row["experts"] == "+".join(SETS[MAIN])]
    about = "rank correlation with the measured share of the experts' score"
    found = [Claim("cells", "cells that were judged: sets, rules and skills", len(rows))]
    for name, some, over in (("five", five, "five experts, rules and skills"), ("all", rows, "blends, too")):
        frozen, mended = (round(correlation(some, which), 4) for which in ("frozen", "per token"))
        statement = f"predicted chance per token: {about}, {over} ({len(some)} cells)"
        found.append(at_least(name, statement, mended, ENOUGH) if some is five else Claim(name, statement, mended))
        found.append(Claim(f"{name}-frozen", f"the score frozen on small models: {about}, {over}", frozen))
    return found


def correlation(rows: list[dict[str, Any]], name: str) -> float:
    return spearman([row[name] for row in rows], [row["measured"] for row in rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    began, rows = time.monotonic(), []
    for row in judged([json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")) for name in FILES]):
        rows.append(row)
        print(json.dumps(row), flush=True)
    Result("real-prediction", claims_of(rows), 0, "full", time.monotonic() - began, (), {"cells": rows}).write(
        given.out
    )


if __name__ == "__main__":
    main()
