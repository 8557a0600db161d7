"""Development problems: drawn once, by a seed, and never among those that a table is made of.

They come from a task's training split where it has one. Where it has none, some of its test problems are set aside,
and no column of the table is tested on them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tessellm.errors import PromptError
from tessellm.evaluate.code_tasks import TASKS, problem_lines
from tessellm.evaluate.runner import Runner, Selection
from tessellm.evaluate.tasks import make_task, text_column

SHARE = 4  # at most one of so many test problems is set aside
DEVELOPMENT = "development"


@dataclass(frozen=True)
class Part:
    """Which problems of a task are asked: those of the test, or `develop` others to choose by."""

    develop: int = 0  # 0: nothing has to be chosen, and nothing is set aside
    seed: int = 0
    development: bool = False


TEST = Part()


@dataclass(frozen=True)
class Development:
    """Where the development problems of a task are: their places in one of its splits, in the order drawn."""

    split: str
    set_aside: bool  # of the test problems, which are the fewer for it
    of: int
    places: tuple[int, ...]

    def __str__(self) -> str:
        taken = "set aside from the" if self.set_aside else "of the"
        return f"{len(self.places)} {taken} {self.of} of its {self.split} split"


def draw(texts: Sequence[str], split: str, part: Part, tested: Sequence[str] | None = None) -> Development:
    """Development problems among `texts`, the problems of a split. `tested` are the test problems, if those are
    others: what stands among them too is not drawn."""
    forbidden = set(tested or ())
    free = [place for place, text in enumerate(texts) if text not in forbidden]
    most = len(free) if tested is not None else max(1, len(free) // SHARE)
    if len(free) < (1 if tested is not None else 2):
        raise PromptError(
            f"there are no problems to develop on: the {split} split has {len(texts)}, {len(free)} of them usable. "
            "Expected a training split, or at least two test problems"
        )
    places = random.Random(part.seed).sample(free, min(part.develop, most))
    return Development(split, tested is None, len(texts), tuple(places))


def remaining(texts: Sequence[str], development: Development) -> list[int]:
    """The places that are left; a problem that stands in the split twice is left out twice."""
    drawn = {texts[place] for place in development.places}
    return [place for place, text in enumerate(texts) if text not in drawn]


def locate(task: Any, part: Part, column: str | None = None) -> Development:
    """The development problems of a task of lm-eval; `column` holds a problem's text, else its whole row does."""
    tested, training = task.config.test_split or task.config.validation_split, task.config.training_split
    if training is None or training == tested:
        return draw(_texts(task.dataset[tested], column), tested, part)
    return draw(_texts(task.dataset[training], column), training, part, _texts(task.dataset[tested], column))


def take(task: Any, part: Part, column: str | None = None) -> Any:
    """The task with the problems of that part alone. Worked examples are never development problems."""
    if not part.develop:
        return task
    found = locate(task, part, column)
    if not (part.development or found.set_aside):
        return task  # the test as it is published
    rows = task.dataset[found.split]
    kept = rows.select(remaining(_texts(rows, column), found))
    if part.development:
        task.dataset[DEVELOPMENT] = rows.select(found.places)
        task.config.test_split = DEVELOPMENT
    task.dataset[found.split] = kept
    examples = task.config.num_fewshot or 0
    if hasattr(task, "sampler"):
        pool = list(task.fewshot_docs())
        if len(pool) < examples:
            raise PromptError(
                f"{task.config.task} needs {examples} worked examples, and {found} are for development: {len(pool)} "
                "are left. Take fewer (--develop), or give more"
            )
        task.sampler.replace_df(pool)
    task.task_docs = task.eval_docs
    return task


@dataclass(frozen=True)
class Developed(Selection):
    """The problems of a part."""

    part: Part

    def of_task(self, name: str, task: Any) -> Any:
        return take(task, self.part, text_column(name))

    def of_lines(self, lines: Sequence[str]) -> list[str]:
        return take_lines(lines, self.part)


def check(runner: Runner, tasks: Sequence[str], part: Part) -> dict[str, Development]:
    """Return where the development problems of each task are; complain of those that cannot be split."""
    found: dict[str, Development] = {}
    for name in tasks if part.develop else ():
        if name in TASKS:
            texts = [json.loads(line)["prompt"] for line in problem_lines(name, runner.data)]
            found[name] = draw(texts, "test", part)
        else:
            task = make_task(name, runner.data)
            found[name] = locate(task, part, text_column(name))
            take(make_task(name, runner.data), replace(part, development=True), text_column(name))
    return found


def take_lines(lines: Sequence[str], part: Part) -> list[str]:
    """The same for problems of evalplus, a JSON line each; they have no training split."""
    if not part.develop:
        return list(lines)
    texts = [json.loads(line)["prompt"] for line in lines]
    found = draw(texts, "test", part)
    return [lines[place] for place in (found.places if part.development else remaining(texts, found))]


def _texts(rows: Any, column: str | None) -> list[str]:
    if column is not None:
        return list(rows[column])
    return [json.dumps(row, sort_keys=True, default=str) for row in rows]
