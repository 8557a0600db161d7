"""`tessellm reproduce`: an experiment, its claims and figures."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from tessellm.commands.shared import JsonPath, Seed, err, out, writable, write_json

MARKS = {True: "holds", False: "does not hold", None: "measured"}


def reproduce(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="An experiment; --list names them.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Run those marked in --list and write one page.")] = False,
    listing: Annotated[bool, typer.Option("--list", help="Name the experiments.")] = False,
    seed: Seed = 0,
    directory: Annotated[Path, typer.Option("--out", "-o", help="Where results go.")] = Path("reproduced"),
    size: Annotated[str, typer.Option(help="cpu: minutes on two cores; full: one GPU.")] = "cpu",
    json_path: JsonPath = None,
) -> None:
    """Run an experiment; exits with 1 if a claim does not hold. Example: tessellm reproduce letters"""
    from ..common.page import write_page
    from ..common.registry import EXPERIMENTS, check_size, chosen, run_experiment

    if listing:
        for known, experiment in EXPERIMENTS.items():
            out.print(f"{known:<16} {'--all' if experiment.paper else '':<6} {experiment.summary}", soft_wrap=True)
        return
    names = chosen(name, everything)
    check_size(size)
    for each in names:
        writable(directory / f"{each}.json")
    results = []
    for number, each in enumerate(names, 1):
        err.print(f"{each} ({number} of {len(names)})", markup=False)
        results.append(run_experiment(each, seed, directory, size, _progress))
        _show_claims(results[-1])
    if everything:
        out.print(f"every claim on one page: {escape(str(write_page(names, directory)))}", soft_wrap=True)
    write_json(json_path, results[0] if name else results)
    if any(claim["holds"] is False for result in results for claim in result["claims"]):
        sys.exit(1)


def _progress(text: str) -> None:
    err.print(f"  {text}", markup=False, soft_wrap=True)


def _show_claims(result: dict[str, Any]) -> None:
    """Claims as a list: the mark, what was claimed, what came out, the target."""
    from ..common.claims import shown

    out.print(f"{result['name']} ({result['seconds']:.0f} s)", style="bold")
    for claim in result["claims"]:
        target = f" (target {claim['target']})" if claim["target"] else ""
        text = f"{claim['statement']}: {shown(claim['value'])}{target}"
        lines = textwrap.wrap(text, max(40, out.width - 17), break_long_words=False, break_on_hyphens=False)
        style = "red" if claim["holds"] is False else ""
        for mark, line in zip([MARKS[claim["holds"]]] + [""] * len(lines), lines, strict=False):
            out.print(f"  {mark:<14} {line}", style=style, markup=False, soft_wrap=True)
