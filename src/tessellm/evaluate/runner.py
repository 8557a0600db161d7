"""Runner: tasks on one model, in the same way for every column of a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import RecipeError
from ..model import ComposedForCausalLM
from ..text.chat import Chat

Advance = Callable[[int], None]


@dataclass(frozen=True)
class Selection:
    """Which of a task's problems are asked: all of them."""

    def of_task(self, name: str, task: Any) -> Any:
        """Return a task of lm-eval with those problems."""
        return task

    def of_lines(self, lines: Sequence[str]) -> list[str]:
        """Return those of evalplus' problems, a JSON line each."""
        return list(lines)


@dataclass(frozen=True)
class Runner:
    """Where problems come from, and how texts are written."""

    data: Path | None = None
    batch_size: int = 8
    progress: Callable[[str, str], Advance] = lambda column, task: lambda done: None
    note: Callable[[str], None] = lambda text: None
    chat: Chat | None = None  # problems are put through the chat template
    selection: Selection = Selection()

    def identity(self) -> dict[str, Any]:
        """Return what of it tells one evaluation from another."""
        chat = {"chat": asdict(self.chat)} if self.chat is not None else {}
        return {"data": str(self.data) if self.data is not None else None, **chat}

    def run(
        self,
        name: str,
        model: ComposedForCausalLM,
        tasks: Sequence[str],
        journals: Path | None = None,
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
                lines = self.selection.of_lines(code_tasks.problem_lines(task, self.data))
                yield task, code_tasks.run_code_task(lm, task, lines[:limit])
            else:
                made = self.selection.of_task(task, make_task(task, self.data))
                yield task, run_task(lm, made, limit, self.chat)

    def check(self, tasks: Sequence[str]) -> None:
        """Complain of tasks before anything is run or written."""
        from . import code_tasks
        from .tasks import make_task

        if not tasks:
            raise RecipeError("no task was given. Expected, for instance, --tasks gsm8k,math,humaneval,mbpp")
        for name in tasks:
            if name not in code_tasks.TASKS:
                make_task(name, self.data)
            elif self.chat is not None:
                raise RecipeError(f"{name} is evaluated as evalplus completes code: leave out --chat and --system")
            else:
                code_tasks.check_data(name, self.data)
