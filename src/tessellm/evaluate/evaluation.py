"""An evaluation: columns times tasks, in one folder that a killed run goes on from.

DIR/run.json                     what is evaluated; another evaluation in the same folder is refused
DIR/journals/COLUMN/TASK.jsonl   what was written so far, a line a problem
DIR/development/METHOD/…         what every strength of a merge scored on the development problems
DIR/merges/METHOD-λ/             the merges that became columns: checkpoints
DIR/table.json .md .tex .png     the table
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from ..compose import rule_entry
from ..errors import CheckpointError, MissingExtraError, RecipeError, nearest, require
from ..files import going_on, write_text
from ..model import ComposedForCausalLM
from ..model.variants import alone, check_alone, is_alone, with_rule
from ..provenance import environment
from ..text.chat import Chat
from .development import StrengthChoice, choose, strengths_of
from .merged import Merged
from .merges import METHODS, methods_for
from .runner import Runner, headline_scores
from .splits import Part

KINDS = ("base", "experts", "composition")
DEVELOP = 50


@dataclass(frozen=True)
class EvaluationPlan:
    """What to evaluate, and how."""

    tasks: tuple[str, ...]
    columns: tuple[str, ...] = KINDS
    data: str | None = None
    limit: int | None = None
    rules: tuple[str, ...] = ()  # a composition's column for each; its own rule if none is given
    merges: tuple[str, ...] = ()  # methods, or "all"
    strengths: tuple[float, ...] | None = None  # to choose among, instead of each method's own
    develop: int | None = None  # problems a task that are kept out of the table; where something is chosen, DEVELOP
    seed: int = 0

    def __post_init__(self) -> None:
        for kind in self.columns:
            if kind not in KINDS:
                raise RecipeError(f"unknown column {kind!r}; {nearest(kind, KINDS)}")
        for rule in self.rules:
            rule_entry(rule)
        for method in self.merges:
            if method not in METHODS and method != "all":
                raise RecipeError(f"unknown merging method {method!r}; {nearest(method, (*METHODS, 'all'))}")
        if self.develop is not None and self.develop < 1:
            raise RecipeError(f"expected at least one development problem a task; got {self.develop}")

    def for_experts(self, count: int) -> EvaluationPlan:
        """With every method named, of those that can merge so many experts."""
        return replace(self, merges=tuple(methods_for(count))) if "all" in self.merges else self

    @property
    def part(self) -> Part:
        """The test problems: all, unless something is, or was, chosen on development problems."""
        choosing = any(len(strengths_of(method, self.strengths)) > 1 for method in self.merges)
        return Part(self.develop or (DEVELOP if choosing else 0), self.seed)


@dataclass(frozen=True)
class Column:
    """A column to be filled: what it is, for the record, and how to get its model."""

    identity: Mapping[str, Any]
    load: Callable[[], ComposedForCausalLM]


def columns_of(models: Mapping[str, ComposedForCausalLM], plan: EvaluationPlan) -> dict[str, Column]:
    """The table's columns by name, but for merges; base and experts are those of the first model."""
    first = next(iter(models.values()))
    members = [] if is_alone(first) else list(first.members)
    found = {name: alone(first, name) for name in members if ("base" if name == "base" else "experts") in plan.columns}
    if "composition" in plan.columns:
        for name, model in _compositions(models, plan.rules).items():
            if name in found:
                raise _same_name(name)
            found[name] = model
    if taken := sorted(set(found) & set(plan.merges)):
        raise _same_name(taken[0])
    return {name: Column(identity(model), partial(_itself, model)) for name, model in found.items()}


def _same_name(name: str) -> RecipeError:
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


def evaluate(
    models: Mapping[str, ComposedForCausalLM],
    plan: EvaluationPlan,
    folder: Path,
    batch_size: int = 8,
    progress: Callable[[str, str], Callable[[int], None]] = lambda column, task: lambda done: None,
    note: Callable[[str], None] = lambda text: None,
    chat: Chat | None = None,
) -> Any:
    """Run what is not yet done and write the table; returns it."""
    require("lm_eval", "eval")
    from .table import make_table

    first = next(iter(models.values()))
    plan = plan.for_experts(len(first.members) - 1)
    runner = Runner(Path(plan.data) if plan.data is not None else None, batch_size, progress, note, chat)
    columns = columns_of(models, plan)
    subject = next((name for name in columns if name not in first.members), None)
    choices: dict[str, StrengthChoice] = {}
    if plan.merges and is_alone(first):
        raise RecipeError("--merges merges the first model's members, and that is one member: give a composition first")
    if plan.merges:
        columns |= _merge_columns(first, plan, folder, runner, choices)
    development = runner.check(plan.tasks, plan.part)
    asked = {"chat": asdict(chat)} if chat is not None else {}
    made = {name: each.identity for name, each in columns.items()}
    check_folder(folder, {"plan": asdict(plan), "columns": made, **asked})
    outcomes: dict[str, dict[str, Any]] = {task: {} for task in plan.tasks}
    with going_on(folder):
        for name, column in columns.items():
            journals = folder / "journals" / name
            for task, outcome in runner.run(name, column.load(), plan.tasks, journals, plan.part, plan.limit):
                outcomes[task][name] = outcome
    made_on = {"seed": plan.seed, **environment("lm_eval", "evalplus", "mergekit")}
    table = make_table(outcomes, subject, choices, development, made_on)
    _write(table, folder, note)
    return table


def _merge_columns(
    model: ComposedForCausalLM, plan: EvaluationPlan, folder: Path, runner: Runner, choices: dict[str, StrengthChoice]
) -> dict[str, Column]:
    """A column for every merge of the model's members; how strong it is is chosen when its turn comes."""
    merged = Merged(model, folder / "merges", plan.seed)
    part = replace(plan.part, development=True)

    def score(candidate: ComposedForCausalLM, name: str, journals: Path) -> dict[str, float]:
        outcomes = dict(runner.run(name, candidate, plan.tasks, journals, part))
        return {task: fmean(scores) for task, scores in headline_scores(outcomes).items()}

    def load(method: str) -> ComposedForCausalLM:
        strengths = strengths_of(method, plan.strengths)
        choices[method] = choose(merged, method, strengths, score, folder / "development")
        return merged.load(method, choices[method].chosen)

    for method in plan.merges:
        merged.check(method, strengths_of(method, plan.strengths))
    members = identity(model)["members"]
    return {method: Column({"merge": method, "members": members}, partial(load, method)) for method in plan.merges}


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


def _write(table: Any, folder: Path, note: Callable[[str], None]) -> None:
    from .table import draw, latex, markdown

    write_text(folder / "table.json", json.dumps(table.content(), indent=2) + "\n")
    write_text(folder / "table.md", markdown(table))
    write_text(folder / "table.tex", latex(table))
    try:
        draw(table, folder / "table.png")
    except MissingExtraError as error:
        note(f"no picture: {error}")
