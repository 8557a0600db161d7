"""`tessellm reproduce`: an experiment, its claims and figures."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from .shared import JsonPath, out, write_json


def reproduce(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="An experiment; --list names them.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Run every experiment and write one page.")] = False,
    listing: Annotated[bool, typer.Option("--list", help="Name the experiments.")] = False,
    seed: int = 0,
    directory: Annotated[Path, typer.Option("--out", "-o", help="Where results go.")] = Path("results"),
    size: Annotated[str, typer.Option(help="cpu: minutes on two cores; full: one GPU.")] = "cpu",
    json_path: JsonPath = None,
) -> None:
    """Run an experiment; exits with 1 if a claim does not hold."""
    from ..experiments.page import write_page
    from ..experiments.registry import EXPERIMENTS, chosen, run_experiment

    if listing:
        for known, experiment in EXPERIMENTS.items():
            out.print(f"{known:<16} {experiment.summary}", soft_wrap=True)
        return
    results = [_show_claims(run_experiment(each, seed, directory, size)) for each in chosen(name, everything)]
    if everything:
        out.print(f"every claim on one page: {escape(str(write_page(list(EXPERIMENTS), directory)))}", soft_wrap=True)
    write_json(json_path, results[0] if name else results)
    if any(claim["holds"] is False for result in results for claim in result["claims"]):
        sys.exit(1)


def _show_claims(result: dict[str, Any]) -> dict[str, Any]:
    table = Table("claim", "value", "target", "", title=f"{result['name']} ({result['seconds']:.0f} s)")
    words = {True: "holds", False: "[red]does not hold[/red]", None: "measured"}
    for claim in result["claims"]:
        value = f"{claim['value']:.4g}" if isinstance(claim["value"], float) else str(claim["value"])
        table.add_row(escape(claim["statement"]), escape(value), escape(claim["target"] or ""), words[claim["holds"]])
    out.print(table)
    return result
