"""`tessellm route`: which members answer which prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.markup import escape
from rich.table import Table

from .shared import (
    NARROW,
    PLAIN,
    Device,
    Dtype,
    JsonPath,
    ModelPath,
    calibration_progress,
    out,
    writable,
    write_json,
)

SHOWN = 3  # members of a prior, and their scores
LONGEST = 60  # characters of a prompt
WIDEST = 12  # members of a matrix in text; with more, the errors are listed
ERRORS = 10


def route(
    model: ModelPath,
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT…", help="Prompts; - reads standard input.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(help="Prompts from a file: lines, or .jsonl with the key prompt and perhaps skill or label."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(callback=writable, help="Draw the confusion matrix of labelled prompts here.")
    ] = None,
    device: Device = None,
    dtype: Dtype = None,
    json_path: JsonPath = None,
) -> None:
    """Show which members answer prompts.

    Of labelled prompts: accuracy, base retention, confusion matrix. Example: tessellm route out "What is 3 + 4?"
    """
    from ..errors import PromptError
    from ..inspect.routes import Confusion, checked_labels, draw, route_entry
    from ..load import load_model
    from ..text.inputs import LabelledPrompt, read_labelled, read_prompts

    asked = [LabelledPrompt(prompt) for prompt in read_prompts(prompts or [], None)] if prompts or not file else []
    asked += read_labelled(file) if file else []
    if not asked:
        raise PromptError(f"{file} holds no prompts. Expected one a line")
    labelled = any(prompt.label is not None for prompt in asked)
    if plot is not None and not labelled:
        raise PromptError("--plot draws a confusion matrix, which needs labels: give --file with a key skill or label")
    composition = load_model(model, device, dtype, progress=calibration_progress())
    labels = checked_labels(asked, composition.config.member_names) if labelled else []
    routes = cast(list[Any], composition.route([prompt.prompt for prompt in asked]))
    if labelled:
        confusion = Confusion.of(composition.config.member_names, labels, routes)
        _show_confusion(confusion)
        if plot is not None:
            draw(confusion, plot)
    else:
        _show_routes(asked, routes)
    write_json(json_path, [route_entry(*pair) for pair in zip(asked, routes, strict=True)])


def _show_routes(asked: list[Any], routes: list[Any]) -> None:
    table = Table("prompt", "selected", "prior", "scores", **PLAIN)
    for prompt, each in zip(asked, routes, strict=True):
        text = " ".join(prompt.prompt.split())
        table.add_row(
            escape(text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"),
            escape(each.selected),
            escape(_largest(each.prior)),
            escape(_largest(each.scores)),
        )
    out.print(table)
    out.print(f"threshold: {routes[0].threshold:.2f}; a prompt whose best score is below it stays with the base")


def _largest(numbers: Any) -> str:
    given = {name: number for name, number in numbers.items() if number is not None}
    ranked = sorted(given.items(), key=lambda item: -item[1])[:SHOWN]
    return ", ".join(f"{name} {number:.2f}" for name, number in ranked) or "–"


def _show_confusion(confusion: Any) -> None:
    if len(confusion.members) <= WIDEST:
        table = Table("label", *map(escape, confusion.members), **NARROW)
        for label in confusion.labels:
            counts = [confusion.counts[label, name] for name in confusion.members]
            table.add_row(escape(label), *(str(count) if count else "·" for count in counts))
        out.print(table)
    else:
        errors = confusion.errors()
        for label, selected, count in errors[:ERRORS]:
            out.print(f"{escape(label)} → {escape(selected)}: {count} of {confusion.total(label)}")
        if len(errors) > ERRORS:
            out.print(f"and {len(errors) - ERRORS} more pairs; --json has every prompt, --plot all counts")
    for name, share in (("accuracy", confusion.accuracy), ("base retention", confusion.base_retention)):
        if share is not None:
            out.print(f"{name}: {share:.3f}")
