"""`tessellm merges`: the table of `tessellm evaluate`, with merges of the first model's members beside."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from tessellm.commands.options import ChatOptions, SpeakerOptions
from tessellm.commands.shared import SEEDS, JsonPath, err, numbers, out, words, write_json


@dataclass(frozen=True)
class MergeOptions:
    """Which merges, and what they are chosen on"""

    methods: Annotated[str, typer.Option(help="all, or linear, task-arithmetic, ties, dare, slerp, with commas.")] = (
        "all"
    )
    strengths: Annotated[str, typer.Option(help="Strengths to choose among; one alone is taken as it is.")] = ""
    develop: Annotated[
        int | None, typer.Option(min=1, help="Problems per task for choosing, kept out of the table; 50 else.")
    ] = None
    seed: Annotated[int, typer.Option(**SEEDS, help="Which problems those are; what the merge dare leaves out.")] = 0


def merges(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A composition: folder, hub id or recipe.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="A folder; a run that was stopped goes on there.")],
    tasks: Annotated[str, typer.Option(help="gsm8k, math, humaneval, mbpp, or tasks of lm-eval, with commas.")],
    *,
    data: Annotated[Path | None, typer.Option(help="Local data instead of the hub's: see docs/evaluate.md.")] = None,
    rules: Annotated[str, typer.Option(help="Rules that get a column each, instead of the model's own.")] = "",
    batch_size: Annotated[int, typer.Option(min=1, help="Texts that are written at once.")] = 8,
    merging: MergeOptions,
    chat: ChatOptions,
    speaker: SpeakerOptions,
    json_path: JsonPath = None,
) -> None:
    """Evaluate a composition beside merges of its members.

    Example: tessellm merges out --tasks gsm8k,math,humaneval,mbpp --rules product,evidence -o results
    """
    from tessellm.errors import require

    require("lm_eval", "eval")
    from tessellm.evaluate.evaluation import EvaluationPlan
    from tessellm.evaluate.runner import Runner
    from tessellm.evaluate.table import markdown

    from ..merging.table import MergePlan, evaluate_merges

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    plan = EvaluationPlan(words(tasks), rules=words(rules))
    strengths = numbers(merging.strengths, "--strengths") or None
    wanted = MergePlan(words(merging.methods), strengths, merging.develop, merging.seed)
    runner = Runner(data, batch_size, note=lambda text: err.print(f"note: {text}"), chat=chat.as_chat())
    table = evaluate_merges({Path(model).stem: speaker.load(model)}, plan, wanted, output, runner)
    out.print(markdown(table), soft_wrap=True, markup=False)
    write_json(json_path, table.content())
