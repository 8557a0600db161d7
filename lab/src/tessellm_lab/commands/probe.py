"""`tessellm probe`: what can be read linearly off a model's layers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Column, Table

from tessellm.commands.shared import NARROW, JsonPath, Placement, Seed, err, out, write_json

if TYPE_CHECKING:
    from ..probe.probe import Decodability


@dataclass(frozen=True)
class ProbeOptions:
    """How it is measured"""

    folds: Annotated[int, typer.Option(min=2, help="Folds of the cross-validation.")] = 5
    random_weights: Annotated[bool, typer.Option(help="Also probe the architecture with random weights.")] = True
    seed: Seed = 0
    batch_size: Annotated[int, typer.Option(min=1)] = 16


def probe(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A composition's folder, hub id or recipe, or any Hugging Face model."),
    ],
    data: Annotated[
        Path, typer.Argument(metavar="DATA", help="JSON lines: text, labels, and perhaps position and group.")
    ],
    layer: Annotated[
        list[str] | None,
        typer.Option(help="A module's name or a pattern such as 'model.layers.*.mlp'; may be given several times."),
    ] = None,
    *,
    skip_malformed: Annotated[bool, typer.Option(help="Leave out lines that are malformed or too long.")] = False,
    measured: ProbeOptions,
    placement: Placement,
    json_path: JsonPath = None,
) -> None:
    """Measure what a linear decoder reads off hidden layers.

    Namely labelled constituents of texts.

    Example: tessellm probe out colours.jsonl --layer 'model.layers.*' --json scores.json
    """
    from tessellm.text.visible import visible

    from ..probe.labelled import read_labelled
    from ..probe.probe import fitting
    from ..probe.probe import probe as measure
    from ..probe.probed import load_any

    examples, problems = read_labelled(data, skip_malformed)
    loaded, tokenizer = load_any(model, placement.device, placement.dtype)
    if skip_malformed and tokenizer is not None:
        examples, unread = fitting(loaded, tokenizer, examples)
        problems += unread
    for problem in problems:
        err.print(f"skipped: {escape(visible(problem))}", soft_wrap=True)
    with err.status("loading") as status:
        found = measure(
            loaded, examples, layer or (), tokenizer, lambda text: status.update(escape(text)), **asdict(measured)
        )
    out.print(_table(found))
    out.print(f"{len(examples)} examples; numbers: R², names: share right; on held-out examples, with 95 % intervals")
    write_json(json_path, {"examples": len(examples), "skipped": problems, "scores": [asdict(row) for row in found]})


def _table(found: list[Decodability]) -> Table:
    from tessellm.text.visible import visible

    members = any(row.member for row in found)
    columns: list[Column | str] = [
        *(["member"] if members else []),
        Column("layer", overflow="fold"),  # layers differ in their last characters
        "label",
        "score",
        Column("95 %", no_wrap=True),
        "chance",
        "shuffled",
        "random\nweights",
    ]
    table = Table(*columns, **NARROW)
    for row in found:
        score = row.score
        cells = [
            row.layer,
            visible(row.label, keep=""),
            f"{score.value:.3f}",
            f"{score.low:.2f} to {score.high:.2f}",
            f"{score.chance:.2f}",
        ]
        cells.append(f"{sum(row.shuffled) / len(row.shuffled):.3f}")
        cells.append("" if row.random_weights is None else f"{row.random_weights:.3f}")
        table.add_row(*map(escape, [*([row.member or ""] if members else []), *cells]))
    return table
