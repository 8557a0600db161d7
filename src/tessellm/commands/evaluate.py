"""`tessellm evaluate`: base, experts, compositions and merges on the same tasks, by the same protocol."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from .shared import SEEDS, Device, Dtype, JsonPath, err, load, numbers, out, words, write_json


def evaluate(
    models: Annotated[list[str], typer.Argument(metavar="MODEL…", help="Compositions: folders, hub ids or recipes.")],
    tasks: Annotated[str, typer.Option(help="gsm8k, math, humaneval, mbpp, or tasks of lm-eval, with commas.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="A folder; a run that was stopped goes on there.")],
    columns: Annotated[str, typer.Option(help="Which of base, experts, composition.")] = "base,experts,composition",
    rules: Annotated[str, typer.Option(help="Rules that get a column each, instead of the model's own.")] = "",
    merges: Annotated[
        str, typer.Option(help="Merges of the first model's members beside: all, or linear, task-arithmetic, ties, …")
    ] = "",
    strengths: Annotated[
        str, typer.Option(help="Strengths of merges to choose among; one alone is taken as it is.")
    ] = "",
    develop: Annotated[
        int | None, typer.Option(min=1, help="Problems a task for choosing, kept out of the table; 50 with --merges.")
    ] = None,
    seed: Annotated[int, typer.Option(**SEEDS, help="Which problems those are; what the merge dare leaves out.")] = 0,
    data: Annotated[Path | None, typer.Option(help="Local data instead of the hub's: see docs/evaluate.md.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first problems of each task.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Problems that are decoded at once.")] = 8,
    engine: Annotated[str, typer.Option(help="auto, or reference for the slow path.")] = "auto",
    device: Device = None,
    dtype: Dtype = None,
    json_path: JsonPath = None,
) -> None:
    """Evaluate members, compositions and merges by one protocol.

    Writes a table with intervals.

    Example: tessellm evaluate out --tasks gsm8k,math,humaneval,mbpp --rules product,evidence --merges all -o results
    """
    from ..errors import RecipeError, require

    require("lm_eval", "eval")
    from ..evaluate.evaluation import EvaluationPlan
    from ..evaluate.evaluation import evaluate as run
    from ..evaluate.table import markdown

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    plan = EvaluationPlan(
        tasks=words(tasks),
        columns=words(columns),
        data=str(data) if data is not None else None,
        limit=limit,
        rules=words(rules),
        merges=words(merges),
        strengths=numbers(strengths, "--strengths") or None,
        develop=develop,
        seed=seed,
    )
    names = [Path(model).stem or model for model in models]
    if len(set(names)) < len(names):
        raise RecipeError(f"the models need names of their own for the table's columns; got {', '.join(names)}")
    loaded = {name: load(model, device, dtype) for name, model in zip(names, models, strict=True)}
    with Progress(console=err, transient=True, disable=not err.is_terminal) as progress:

        def started(column: str, task: str) -> Callable[[int], None]:
            bar = progress.add_task(f"{column}, {task}", total=None)
            return lambda done: progress.advance(bar, done)

        table = run(loaded, plan, output, batch_size, engine, started, lambda text: err.print(f"note: {text}"))
    out.print(markdown(table), soft_wrap=True, markup=False)
    write_json(json_path, table.content())
