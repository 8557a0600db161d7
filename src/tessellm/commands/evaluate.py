"""`tessellm evaluate`: base, experts and compositions on the same tasks, by the same protocol."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from ..errors import RecipeError
from .options import ChatOptions, SpeakerOptions
from .shared import JsonPath, err, out, words, write_json


@dataclass(frozen=True)
class ProblemOptions:
    """Which problems"""

    tasks: Annotated[str, typer.Option(help="gsm8k, math, humaneval, mbpp, or tasks of lm-eval, with commas.")]
    data: Annotated[Path | None, typer.Option(help="Local data instead of the hub's: see docs/evaluate.md.")] = None
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first problems of each task.")] = None


@dataclass(frozen=True)
class ColumnOptions:
    """Which columns"""

    columns: Annotated[str, typer.Option(help="Which of base, experts, composition.")] = "base,experts,composition"
    rules: Annotated[str, typer.Option(help="Rules that get a column each, instead of the model's own.")] = ""


def evaluate(
    models: Annotated[
        list[str],
        typer.Argument(metavar="MODEL…", help="Compositions: folders, hub ids or recipes; MODEL:MEMBER: one member."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="A folder; a run that was stopped goes on there.")],
    *,
    problems: ProblemOptions,
    columns: ColumnOptions,
    batch_size: Annotated[int, typer.Option(min=1, help="Texts that are written at once.")] = 8,
    chat: ChatOptions,
    speaker: SpeakerOptions,
    json_path: JsonPath = None,
) -> None:
    """Evaluate members and compositions by one protocol.

    Writes a table with intervals.

    Example: tessellm evaluate out --tasks gsm8k,math,humaneval,mbpp --rules product,mixture -o results
    """
    from ..errors import require

    require("lm_eval", "eval")
    from ..evaluate.evaluation import EvaluationPlan
    from ..evaluate.evaluation import evaluate as run
    from ..evaluate.runner import Runner
    from ..evaluate.table import markdown

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    plan = EvaluationPlan(
        tasks=words(problems.tasks),
        columns=words(columns.columns),
        limit=problems.limit,
        rules=words(columns.rules),
    )
    if plan.rules and speaker.rule is not None:
        raise RecipeError(
            "--rule is the rule of the column composition, and --rules has columns instead of it: give one"
        )
    loaded = {name: speaker.load(model) for name, model in _named(models).items()}
    with Progress(console=err, transient=True, disable=not err.is_terminal) as progress:

        def started(column: str, task: str) -> Callable[[int], None]:
            bar = progress.add_task(f"{column}, {task}", total=None)
            return lambda done: progress.advance(bar, done)

        def note(text: str) -> None:
            err.print(f"note: {text}")

        runner = Runner(problems.data, batch_size, started, note, chat.as_chat())
        table = run(loaded, plan, output, runner)
    out.print(markdown(table), soft_wrap=True, markup=False)
    write_json(json_path, table.content())


def _named(models: list[str]) -> dict[str, str]:
    """Name every model for the table: by its folder or recipe, and its member."""
    from ..load import split_speaker

    parts = [split_speaker(model) for model in models]
    names = [(Path(path).stem or path) + (f"-{member}" if member else "") for path, member in parts]
    if len(set(names)) < len(names):
        raise RecipeError(f"the models need names of their own for the table's columns; got {', '.join(names)}")
    return dict(zip(names, models, strict=True))
