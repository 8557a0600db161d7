"""An evaluation: columns times tasks, in one folder that a killed run goes on from.

DIR/run.json                     what is evaluated; another evaluation in the same folder is refused
DIR/journals/COLUMN/TASK.jsonl   what was written so far, a line a problem
DIR/table.json .md               the table
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..compose import rule_entry
from ..errors import CheckpointError, RecipeError, nearest, require
from ..files import going_on, write_text
from ..model import ComposedForCausalLM
from ..model.variants import alone, check_alone, is_alone, with_rule
from ..provenance import environment
from .runner import Runner

KINDS = ("base", "experts", "composition")


@dataclass(frozen=True)
class EvaluationPlan:
    """What to evaluate."""

    tasks: tuple[str, ...]
    columns: tuple[str, ...] = KINDS
    limit: int | None = None
    rules: tuple[str, ...] = ()  # a composition's column for each; its own rule if none is given

    def __post_init__(self) -> None:
        for kind in self.columns:
            if kind not in KINDS:
                raise RecipeError(f"unknown column {kind!r}; {nearest(kind, KINDS)}")
        for rule in self.rules:
            rule_entry(rule)


@dataclass(frozen=True)
class Column:
    """A column to be filled: what it is, for the record, and how to get its model."""

    identity: Mapping[str, Any]
    load: Callable[[], ComposedForCausalLM]


def columns_of(models: Mapping[str, ComposedForCausalLM], plan: EvaluationPlan) -> dict[str, Column]:
    """The table's columns by name; base and experts are those of the first model."""
    first = next(iter(models.values()))
    members = [] if is_alone(first) else list(first.members)
    found = {name: alone(first, name) for name in members if ("base" if name == "base" else "experts") in plan.columns}
    if "composition" in plan.columns:
        for name, model in _compositions(models, plan.rules).items():
            if name in found:
                raise same_name(name)
            found[name] = model
    return {name: Column(identity(model), partial(_itself, model)) for name, model in found.items()}


def same_name(name: str) -> RecipeError:
    return RecipeError(f"two columns would be called {name!r}. Rename the member, or the model's folder")


def _itself(model: ComposedForCausalLM) -> ComposedForCausalLM:
    return model


def _compositions(models: Mapping[str, ComposedForCausalLM], rules: Sequence[str]) -> dict[str, ComposedForCausalLM]:
    single = len(models) == 1
    if not rules:
        return {"composition" if single and not is_alone(model) else name: model for name, model in models.items()}
    for name, model in models.items():
        if is_alone(model):
            check_alone(name, rules)
    return {
        rule if single else f"{name}-{rule}": with_rule(model, rule) for name, model in models.items() for rule in rules
    }


def subject_of(columns: Mapping[str, Column], model: ComposedForCausalLM) -> str | None:
    """Return the column that the others are compared with: the first that is no member alone."""
    return next((name for name in columns if name not in model.members), None)


def evaluate(models: Mapping[str, ComposedForCausalLM], plan: EvaluationPlan, folder: Path, runner: Runner) -> Any:
    """Run what is not yet done and write the table; returns it."""
    require("lm_eval", "eval")
    from .table import make_table

    columns = columns_of(models, plan)
    runner.check(plan.tasks)
    outcomes = run_columns(columns, plan, folder, runner)
    table = make_table(outcomes, subject_of(columns, next(iter(models.values()))), environment("lm_eval", "evalplus"))
    write_table(table, folder)
    return table


def run_columns(
    columns: Mapping[str, Column],
    plan: EvaluationPlan,
    folder: Path,
    runner: Runner,
    asked: Mapping[str, Any] | None = None,
) -> dict[str, dict[str, Any]]:
    """Return every task's outcomes by column. `asked`: what else tells this evaluation from others."""
    made = {name: each.identity for name, each in columns.items()}
    about = {"plan": asdict(plan), "columns": made, **runner.identity(), **(asked or {})}
    check_folder(folder, about)
    outcomes: dict[str, dict[str, Any]] = {task: {} for task in plan.tasks}
    with going_on(folder):
        for name, column in columns.items():
            journals = folder / "journals" / name
            for task, outcome in runner.run(name, column.load(), plan.tasks, journals, plan.limit):
                outcomes[task][name] = outcome
    return outcomes


def check_folder(folder: Path, what: dict[str, Any]) -> None:
    """Begin, or go on with the same. Where another was begun and nothing came of it, begin anew."""
    path = folder / "run.json"
    text = json.dumps(what, indent=2, sort_keys=True) + "\n"
    try:
        begun = path.read_bytes() if path.exists() else None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}. Choose another folder") from error
    if begun == text.encode():
        return
    others = [each for each in folder.rglob("*") if each != path and not each.name.startswith(f".{path.name}.")]
    if begun is None and others:
        raise CheckpointError(f"{folder} exists and holds something else. Choose another name, or remove it")
    if any(each.is_file() and each.stat().st_size for each in others):
        raise CheckpointError(
            f"{folder} holds another evaluation (see {path}): other models, tasks or data. Choose another folder"
        )
    write_text(path, text)


def identity(model: ComposedForCausalLM) -> dict[str, Any]:
    """What a model is, for the record."""
    kept = ("name", "kind", "weight", "source", "revision")
    return {
        "members": [{key: entry.get(key) for key in kept} for entry in model.config.members],
        "rule": model.config.rule,
        "dtype": str(model.dtype),
    }


def write_table(table: Any, folder: Path) -> None:
    """Write a table in both forms."""
    from .table import markdown

    write_text(folder / "table.json", json.dumps(table.content(), indent=2) + "\n")
    write_text(folder / "table.md", markdown(table))
