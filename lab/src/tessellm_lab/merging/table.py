"""A table with columns for merges: the library's columns and, beside them, merges of the first model's members.

Where a strength is chosen, it is on development problems, and no column is tested on them.

DIR/development/METHOD/…   what every strength of a merge scored on the development problems
DIR/merges/METHOD-λ/       the merges that became columns: checkpoints
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from tessellm.errors import RecipeError, nearest, require
from tessellm.evaluate.evaluation import (
    Column,
    EvaluationPlan,
    columns_of,
    run_columns,
    same_name,
    subject_of,
    write_table,
)
from tessellm.evaluate.runner import Runner
from tessellm.model import ComposedForCausalLM
from tessellm.model.variants import is_alone
from tessellm.provenance import environment

from .development import StrengthChoice, choose, strengths_of
from .merged import Merged
from .merges import METHODS, methods_for
from .splits import Developed, Development, Part, check

DEVELOP = 50


@dataclass(frozen=True)
class MergePlan:
    """Which merges, and how their strengths are chosen."""

    methods: tuple[str, ...]  # or "all"
    strengths: tuple[float, ...] | None = None  # to choose among, instead of each method's own
    develop: int | None = None  # problems a task that are kept out of the table; where something is chosen, DEVELOP
    seed: int = 0

    def __post_init__(self) -> None:
        for method in self.methods:
            if method not in METHODS and method != "all":
                raise RecipeError(f"unknown merging method {method!r}; {nearest(method, (*METHODS, 'all'))}")
        if self.develop is not None and self.develop < 1:
            raise RecipeError(f"expected at least one development problem a task; got {self.develop}")

    def for_experts(self, count: int) -> MergePlan:
        """With every method named, of those that can merge so many experts."""
        return replace(self, methods=tuple(methods_for(count))) if "all" in self.methods else self

    @property
    def part(self) -> Part:
        """The test problems: all, unless something is, or was, chosen on development problems."""
        choosing = any(len(strengths_of(method, self.strengths)) > 1 for method in self.methods)
        return Part(self.develop or (DEVELOP if choosing else 0), self.seed)


def evaluate_merges(
    models: Mapping[str, ComposedForCausalLM], plan: EvaluationPlan, merges: MergePlan, folder: Path, runner: Runner
) -> Any:
    """Run what is not yet done and write the table; returns it."""
    require("lm_eval", "eval")
    from tessellm.evaluate.table import make_table

    first = next(iter(models.values()))
    if is_alone(first):
        raise RecipeError("merges are of a composition's members, and this is one member: give a composition first")
    merges = merges.for_experts(len(first.members) - 1)
    runner = replace(runner, selection=Developed(merges.part))
    columns, choices = columns_of(models, plan), dict[str, StrengthChoice]()
    if taken := sorted(set(columns) & set(merges.methods)):
        raise same_name(taken[0])
    beside = merge_columns(first, plan, merges, folder, runner, choices)
    runner.check(plan.tasks)
    development = check(runner, plan.tasks, merges.part)
    outcomes = run_columns({**columns, **beside}, plan, folder, runner, {"merges": asdict(merges)})
    about = {
        "choices": {name: asdict(choice) for name, choice in choices.items()},
        "development": {task: asdict(found) for task, found in development.items()},
        "seed": merges.seed,
        **environment("lm_eval", "evalplus", "mergekit"),
    }
    table = make_table(outcomes, subject_of(columns, first), about, notes(choices, development))
    write_table(table, folder)
    return table


def merge_columns(
    model: ComposedForCausalLM,
    plan: EvaluationPlan,
    merges: MergePlan,
    folder: Path,
    runner: Runner,
    choices: dict[str, StrengthChoice],
) -> dict[str, Column]:
    """A column for every merge of the model's members; how strong it is is chosen when its turn comes."""
    from tessellm.evaluate.evaluation import identity

    merged = Merged(model, folder / "merges", merges.seed)
    choosing = replace(runner, selection=Developed(replace(merges.part, development=True)))

    def score(candidate: ComposedForCausalLM, name: str, journals: Path) -> dict[str, float]:
        from tessellm.evaluate.table import headline

        outcomes: dict[str, Any] = dict(choosing.run(name, candidate, plan.tasks, journals))
        return {task: fmean(outcome.scores(headline(outcome))) for task, outcome in outcomes.items()}

    def load(method: str) -> ComposedForCausalLM:
        strengths = strengths_of(method, merges.strengths)
        choices[method] = choose(merged, method, strengths, score, folder / "development")
        return merged.load(method, choices[method].chosen)

    for method in merges.methods:
        merged.check(method, strengths_of(method, merges.strengths))
    members = identity(model)["members"]
    return {method: Column({"merge": method, "members": members}, partial(load, method)) for method in merges.methods}


def notes(choices: Mapping[str, StrengthChoice], development: Mapping[str, Development]) -> list[str]:
    """How merges came to their strengths."""
    from tessellm.evaluate.table import NAMES

    lines = ["\n".join(f"- {choice}" for choice in choices.values())] if choices else []
    if development:
        where = "; ".join(f"{NAMES.get(task, task)}: {found}" for task, found in development.items())
        lines.append(f"Chosen by the mean score over development problems, none of which is in this table. {where}.")
    return lines
