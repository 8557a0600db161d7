"""Runner: tasks on one model, in the same way for every column of a table and every candidate of a choice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import RecipeError
from ..model import ComposedForCausalLM
from ..text.chat import Chat
from .splits import TEST, Development, Part

Advance = Callable[[int], None]


@dataclass(frozen=True)
class Runner:
    """Where problems come from, and how texts are written."""

    data: Path | None = None
    batch_size: int = 8
    progress: Callable[[str, str], Advance] = lambda column, task: lambda done: None
    note: Callable[[str], None] = lambda text: None
    chat: Chat | None = None  # problems are put through the chat template

    def run(
        self,
        name: str,
        model: ComposedForCausalLM,
        tasks: Sequence[str],
        journals: Path | None = None,
        part: Part = TEST,
        limit: int | None = None,
    ) -> Iterator[tuple[str, Any]]:
        """Each task's outcome, as soon as it is there. `journals` is where a killed run goes on from."""
        from . import code_tasks
        from .harness import ComposedLM
        from .journal import Journal
        from .protocol import run_task
        from .tasks import make_task

        lm = ComposedLM(model, self.batch_size, note=self.note)
        for task in tasks:
            lm.journal = Journal(journals / f"{task}.jsonl" if journals is not None else None)
            lm.progress = self.progress(name, task)
            if task in code_tasks.TASKS:
                yield task, code_tasks.run_code_task(lm, task, self.data, limit, part=part)
            else:
                yield task, run_task(lm, make_task(task, self.data, part), limit, self.chat)

    def check(self, tasks: Sequence[str], part: Part = TEST) -> dict[str, Development]:
        """Complain of tasks before anything is run or written; where their development problems are."""
        from . import code_tasks
        from .splits import draw, locate
        from .tasks import make_task, text_column

        if not tasks:
            raise RecipeError("no task was given. Expected, for instance, --tasks gsm8k,math,humaneval,mbpp")
        found: dict[str, Development] = {}
        for name in tasks:
            if name in code_tasks.TASKS and self.chat is not None:
                raise RecipeError(f"{name} is evaluated as evalplus completes code: leave out --chat and --system")
            if name in code_tasks.TASKS:
                code_tasks.check_data(name, self.data)
                if part.develop:
                    found[name] = draw(code_tasks.problem_texts(name, self.data), "test", part)
            else:
                task = make_task(name, self.data)
                if part.develop:
                    found[name] = locate(task, part, text_column(name))
                    make_task(name, self.data, Part(part.develop, part.seed, development=True))
        return found


def headline_scores(outcomes: Mapping[str, Any]) -> dict[str, list[float]]:
    """What the table would show of each task, problem by problem."""
    from .table import headline

    return {task: outcome.scores(headline(outcome)) for task, outcome in outcomes.items()}
