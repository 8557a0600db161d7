"""An evaluation: columns times tasks, in one folder that a killed run goes on from.

DIR/run.json                  what is evaluated; another evaluation in the same folder is refused
DIR/journals/COLUMN/TASK.jsonl   what was written so far, a line a problem
DIR/table.json .md .tex .png  the table
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, MissingExtraError, RecipeError, nearest, require
from ..files import write_text
from ..model import ComposedForCausalLM
from .columns import alone

KINDS = ("base", "experts", "composition")


@dataclass(frozen=True)
class Plan:
    """What to evaluate, and how."""

    tasks: tuple[str, ...]
    columns: tuple[str, ...] = KINDS
    data: str | None = None
    limit: int | None = None

    def __post_init__(self) -> None:
        for kind in self.columns:
            if kind not in KINDS:
                raise RecipeError(f"unknown column {kind!r}; {nearest(kind, KINDS)}")
        if not self.tasks:
            raise RecipeError("no task was given. Expected, for instance, --tasks gsm8k,math,humaneval,mbpp")


def columns_of(models: Mapping[str, ComposedForCausalLM], kinds: Sequence[str]) -> dict[str, ComposedForCausalLM]:
    """The table's columns by name; base and experts are those of the first model."""
    first = next(iter(models.values()))
    found: dict[str, ComposedForCausalLM] = {}
    for name in first.members:
        if ("base" if name == "base" else "experts") in kinds:
            found[name] = alone(first, name)
    if "composition" in kinds:
        single = len(models) == 1
        compositions = {"composition" if single else name: model for name, model in models.items()}
        if taken := sorted(set(found) & set(compositions)):
            raise RecipeError(
                f"two columns would be called {taken[0]!r}: a member and a model. Rename the model's folder"
            )
        found |= compositions
    return found


def evaluate(
    models: Mapping[str, ComposedForCausalLM],
    plan: Plan,
    folder: Path,
    batch_size: int = 8,
    engine: str = "auto",
    progress: Callable[[str, str], Callable[[int], None]] = lambda column, task: lambda done: None,
    note: Callable[[str], None] = lambda text: None,
) -> Any:
    """Run what is not yet done and write the table; returns it."""
    require("lm_eval", "eval")
    from .table import make_table

    columns = columns_of(models, plan.columns)
    for task in plan.tasks:
        _check_task(task, _data(plan))
    check_folder(folder, {"plan": asdict(plan), "columns": {name: _identity(model) for name, model in columns.items()}})
    outcomes: dict[str, dict[str, Any]] = {task: {} for task in plan.tasks}
    for name, model in columns.items():
        for task, outcome in _column(model, plan, folder / "journals" / name, batch_size, engine, name, progress, note):
            outcomes[task][name] = outcome
    subject = next((name for name in columns if name not in next(iter(models.values())).members), None)
    table = make_table(outcomes, subject)
    _write(table, folder, note)
    return table


def _column(
    model: ComposedForCausalLM,
    plan: Plan,
    journals: Path,
    batch_size: int,
    engine: str,
    name: str,
    progress: Callable[[str, str], Callable[[int], None]],
    note: Callable[[str], None],
) -> Iterator[tuple[str, Any]]:
    from . import code_tasks
    from .harness import ComposedLM
    from .journal import Journal
    from .protocol import run_task
    from .tasks import make_task

    data = _data(plan)
    lm = ComposedLM(model, batch_size, engine=engine, note=note)
    for task in plan.tasks:
        lm.journal, lm.progress = Journal(journals / f"{task}.jsonl"), progress(name, task)
        if task in code_tasks.TASKS:
            yield task, code_tasks.run_code_task(lm, task, data, plan.limit)
        else:
            yield task, run_task(lm, make_task(task, data), plan.limit)


def _data(plan: Plan) -> Path | None:
    return Path(plan.data) if plan.data is not None else None


def _check_task(task: str, data: Path | None) -> None:
    """Complain before anything is run or written."""
    from . import code_tasks
    from .tasks import make_task

    if task in code_tasks.TASKS:
        code_tasks.check_data(task, data)
    else:
        make_task(task, data)


def check_folder(folder: Path, what: dict[str, Any]) -> None:
    """Begin, or go on with the same."""
    path = folder / "run.json"
    text = json.dumps(what, indent=2, sort_keys=True) + "\n"
    if path.exists():
        if path.read_text(encoding="utf-8") != text:
            raise CheckpointError(
                f"{folder} holds another evaluation (see {path}): other models, tasks or data. Choose another folder"
            )
        return
    if folder.is_dir() and any(folder.iterdir()):
        raise CheckpointError(f"{folder} exists and holds something else. Choose another name, or remove it")
    write_text(path, text)


def _identity(model: ComposedForCausalLM) -> dict[str, Any]:
    kept = ("name", "kind", "weight", "source", "revision")
    return {
        "members": [{key: entry.get(key) for key in kept} for entry in model.config.members],
        "rule": model.config.rule,
        "termination": model.config.termination,
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
