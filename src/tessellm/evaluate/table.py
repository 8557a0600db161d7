"""The table: a row per task, a column per model, with intervals; as JSON and Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from .intervals import Difference, Interval, bootstrap, compare
from .protocol import Outcome
from .tasks import HEADLINE

NAMES = {"gsm8k": "GSM8K", "math": "MATH", "humaneval": "HumanEval+", "mbpp": "MBPP+"}
CODE_METRIC = "pass@1,plus"


@dataclass(frozen=True)
class Cell:
    """One model on one task."""

    metric: str
    score: Interval
    others: dict[str, float]  # the task's other metrics, their means
    problems: int
    failed: int
    tokens: float  # written a problem
    went_on: float  # share that only the limit of tokens ended
    seconds: float


@dataclass(frozen=True)
class Table:
    """Cells by task and column; differences by task: of the first column that is a composition from every other."""

    columns: list[str]
    cells: dict[str, dict[str, Cell]]
    against: dict[str, dict[str, Difference]]
    subject: str | None
    about: Mapping[str, Any] = field(default_factory=dict)  # where it was made and with what
    notes: tuple[str, ...] = ()  # paragraphs below it

    def content(self) -> dict[str, Any]:
        """For programs."""
        content = asdict(self)
        del content["notes"]
        return {**content, **content.pop("about")}


def make_table(
    outcomes: Mapping[str, Mapping[str, Outcome]],
    subject: str | None,
    about: Mapping[str, Any] | None = None,
    notes: Sequence[str] = (),
) -> Table:
    """`outcomes` by task, then column. `subject` is the column that the others are compared with. `about` is where
    it was made and with what."""
    cells = {task: {name: _cell(outcome) for name, outcome in row.items()} for task, row in outcomes.items()}
    against = {task: _against(row, subject) for task, row in outcomes.items() if subject is not None}
    columns = list(dict.fromkeys(name for row in outcomes.values() for name in row))
    return Table(columns, cells, against, subject, about or {}, tuple(notes))


def _against(row: Mapping[str, Outcome], subject: str) -> dict[str, Difference]:
    own = row[subject].scores(headline(row[subject]))
    return {name: compare(own, other.scores(headline(other))) for name, other in row.items() if name != subject}


def headline(outcome: Outcome) -> str:
    """The metric that the table shows."""
    metrics = list(outcome.problems[0].scores)
    wanted = HEADLINE.get(outcome.task, CODE_METRIC)
    return wanted if wanted in metrics else metrics[0]


def _cell(outcome: Outcome) -> Cell:
    metric, problems = headline(outcome), outcome.problems
    others = {key: bootstrap(outcome.scores(key)).mean for key in problems[0].scores if key != metric}
    return Cell(
        metric=metric,
        score=bootstrap(outcome.scores(metric)),
        others=others,
        problems=len(problems),
        failed=sum(problem.error is not None for problem in problems),
        tokens=sum(problem.tokens for problem in problems) / len(problems),
        went_on=sum(problem.finish_reason == "length" for problem in problems) / len(problems),
        seconds=sum(problem.seconds for problem in problems),
    )


def markdown(table: Table) -> str:
    """For people: scores in percent with intervals, then what it took."""
    lines = ["| task | " + " | ".join(table.columns) + " |", "|---" * (len(table.columns) + 1) + "|"]
    for task, row in table.cells.items():
        lines.append(
            f"| {NAMES.get(task, task)} | " + " | ".join(_shown(row.get(name)) for name in table.columns) + " |"
        )
    lines += ["", "| task | column | other metrics | tokens | went on | failed | seconds | difference | p |"]
    lines.append("|---" * 9 + "|")
    for task, row in table.cells.items():
        for name, cell in row.items():
            other = ", ".join(f"{metric} {100 * mean:.1f}" for metric, mean in cell.others.items())
            ran = f"{cell.tokens:.0f} | {cell.went_on:.0%} | {cell.failed} of {cell.problems} | {cell.seconds:.1f}"
            lines.append(f"| {NAMES.get(task, task)} | {name} | {other} | {ran} | {_difference(table, task, name)} |")
    note = "Scores in percent with 95 % bootstrap intervals over problems. went on: ended by the limit of tokens alone."
    if table.subject is not None:
        note += f" difference: {table.subject} minus the column, paired; p two-sided."
    return "\n".join([*lines, "", note, *(line for each in table.notes for line in ("", each)), ""])


def _shown(cell: Cell | None) -> str:
    if cell is None:
        return ""
    mean, low, high = (100 * each for each in (cell.score.mean, cell.score.low, cell.score.high))
    return f"{mean:.1f} ({low:.1f}–{high:.1f})"


def _difference(table: Table, task: str, name: str) -> str:
    found = table.against.get(task, {}).get(name)
    if found is None:
        return " | "
    mean, low, high = (100 * each for each in (found.interval.mean, found.interval.low, found.interval.high))
    return f"{mean:+.1f} ({low:+.1f} to {high:+.1f}) | {found.p:.2g}"
