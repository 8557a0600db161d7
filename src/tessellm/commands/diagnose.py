"""`tessellm diagnose`: can these be composed, where do they interfere, what to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from .options import ChatOptions, SpeakerOptions
from .shared import PLAIN, JsonPath, ModelPath, Shown, err, out, writable, write_json

if TYPE_CHECKING:
    from ..diagnose import Diagnosis


@dataclass(frozen=True)
class WritingOptions:
    """What is written after a prompt"""

    max_new_tokens: Annotated[int, typer.Option(min=1, help="How much.")] = 64
    batch_size: Annotated[int, typer.Option(min=1, help="Texts at once.")] = 8


def diagnose(
    model: ModelPath,
    prompts: Annotated[
        Path,
        typer.Argument(metavar="PROMPTS", help="A file: .jsonl with prompt, text or both, .json, or lines of prompts."),
    ],
    report: Annotated[
        Path | None, typer.Option("--out", "-o", callback=writable, help="Write the HTML report here.")
    ] = None,
    *,
    skip_malformed: Annotated[bool, typer.Option(help="Leave out entries that are malformed or too long.")] = False,
    writing: WritingOptions,
    chat: ChatOptions,
    speaker: SpeakerOptions,
    json_path: JsonPath = None,
) -> None:
    """Diagnose a composition on prompts or on given texts.

    Prompts are continued, texts are read as they are. Example: tessellm diagnose out prompts.jsonl -o report.html
    """
    from ..diagnose import diagnose as measure
    from ..diagnose.prompts import read_examples
    from ..files import write_text
    from ..text.visible import visible

    examples, problems = read_examples(prompts, skip_malformed)
    composition = speaker.load_composition(model, "a diagnosis is of how members go together")
    with Shown("diagnosing") as progress:
        found = measure(
            composition, examples, batch_size=writing.batch_size, skip_malformed=skip_malformed,
            progress=progress,
            max_new_tokens=writing.max_new_tokens, chat=chat.as_chat(),
        )  # fmt: skip
    for problem in (*problems, *found.skipped):
        err.print(f"skipped: {escape(visible(problem))}", soft_wrap=True)
    if chat.lacks_chat(composition, [example.prompt for example in examples]):
        note = "prompts were read as they are; --chat puts them into the chat template, where the rule mixture routes"
        err.print(f"note: {note}", soft_wrap=True)
    if found.texts == 1:
        err.print("note: intervals say how much texts differ, and there is only one")
    out.print(_table(found))
    for advice in found.advice:
        out.print(f"• {escape(visible(advice.text))}", soft_wrap=True)
    if report is not None:
        write_text(report, found.to_html())
        out.print(f"report → {escape(str(report))}", soft_wrap=True)
    write_json(json_path, found.to_dict() | {"skipped": [*problems, *found.skipped]})


def _table(found: Diagnosis) -> Table:
    from ..diagnose.rates import counted

    numbers = found.found
    table = Table("", "share", "95 % interval", **PLAIN)
    named = {f"{name} active": rate for name, rate in numbers.active.items()}
    rows = named | {"two at once": numbers.several, "interference": numbers.interfering, "nobody's": numbers.novel}
    rows["texts predicted right"] = found.predicted
    for name, rate in rows.items():
        table.add_row(escape(name), f"{rate.value:.1%}", f"{rate.low:.1%} to {rate.high:.1%}")
    table.caption = f"{counted(found.texts, 'text')}, {counted(found.tokens, 'token')}"
    table.caption_justify = "left"
    return table
