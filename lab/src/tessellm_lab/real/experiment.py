"""`reproduce real`: real adapters composed, merged and routed, judged by what they write and how they read.

What is measured is kept in `real/SIZE.jsonl`, cell by cell: a run that was stopped goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tessellm.demo.adapters import DOMAINS
from tessellm.errors import EngineError, TessellmError
from tessellm.files import going_on
from tessellm.members import Member

from ..common.claims import Result
from ..common.devices import device_for
from ..common.panels import drawn
from ..common.workers import by_processes
from .columns import ALL, Column, own_columns, peer_columns, trained_column
from .costs import costs_of
from .measure import BusyError, Measuring, NotMeasuredError, Task, new_tokens
from .members import Experts, Places, load_base
from .plan import BLENDS, PAIRS, PLANS, SETS, TWINS, TWO, Plan
from .results import SetResult, claims_of
from .shared import SharedJournal
from .skills import SKILLS, Example, read
from .tasks import function_prompt, two_requests

Log = Callable[[str], None]
OTHER = 2  # how far on the seed of the other training is: by that of the next one rules were chosen
SHOWN = 2  # prompts per task whose texts the result shows
SLOW = {"arrow": 0, "rule": 1, "router": 2}  # kinds of columns that take longest


def run(seed: int, out: Path, size: str, log: Log = print) -> Result:
    """Claims, tables, and pictures in `out`."""
    return measure(Run(Places.found(), PLANS[size], seed, out, size), log)


@dataclass(frozen=True)
class Run:
    """One run of the experiment: with what, how much of it, and where results go."""

    places: Places
    plan: Plan
    seed: int
    out: Path
    size: str
    device: str | None = None  # None: as the size asks
    frozen: bool = False  # tables of what the journal has; nothing is measured

    @property
    def runs_on(self) -> str:
        return self.device or device_for(self.size)

    def measuring(self, log: Log) -> Measuring:
        path = self.out / "real" / f"{self.size}.jsonl"
        made = Measuring(SharedJournal(path), self.plan, log, self.frozen)
        if not self.frozen:
            made.sign()
        elif not made.measured_on:
            raise TessellmError(
                f"expected a journal that says on what it was measured; {path} does not, or is not there. Run without "
                "--frozen, or give the folder of a run as --out"
            )
        return made


def measure(run: Run, log: Log = print, workers: int = 0) -> Result:
    """The same with places and a plan of the caller's; `workers` processes measure first what there is to measure."""
    since, plan = time.monotonic(), run.plan
    device = run.runs_on
    with going_on(run.out / "real"):
        list(by_processes(fill, [(run, number) for number in range(workers)], workers))
        measuring, base = run.measuring(log), load_base(run.places, device)
        found: list[SetResult] = []
        costs: dict[str, Any] = {}
        for name in plan.sets:
            asked = _asked(name, run, base)
            if asked is None:
                log(f"{name}: left out, its adapters are not there")
                continue
            experts, tasks = asked
            columns = [*own_columns(experts, plan.of_set(name)), *_others(name, run, experts, measuring)]
            found.append(_measured(name, columns, tasks, measuring))
            costs = costs or costs_of(found[-1], tasks, measuring)
            for column in columns:
                column.release()
    texts = _texts(found, run.places, plan)
    sets = {each.name: each.table() for each in found}
    tables = {"sets": sets, "costs": costs, "texts": texts, "measured on": measuring.measured_on}
    figures = drawn(lambda: _draw(tables, run.out)) if found and any(found[0].written.values()) else []
    seconds = time.monotonic() - since if not run.frozen else measuring.seconds
    return Result("real", claims_of(tables, run.size == "full"), run.seed, run.size, seconds, figures, tables)


def fill(run: Run, number: int) -> None:
    """Measure cells that no other process is at, set by set; wait for none."""
    measuring = run.measuring(lambda text: print(f"{number}: {text}", flush=True))
    base = load_base(run.places, run.runs_on)
    for name in run.plan.sets:
        asked = _asked(name, run, base)
        if asked is None:
            continue
        experts, tasks = asked
        own = own_columns(experts, run.plan.of_set(name))  # first: nothing has to be tuned for them
        for columns in (own, [*own, *_others(name, run, experts, measuring)]):
            for job in jobs_of(columns, tasks, measuring):
                try:
                    job()
                except BusyError:
                    pass
                except EngineError as error:  # too many processes for the memory, perhaps: the last one tries again
                    measuring.log(f"not measured: {error}")
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()  # other processes need it


def _draw(tables: Mapping[str, Any], out: Path) -> str:
    from .figure import draw

    return draw(tables, out)


def _asked(name: str, run: Run, base: Member) -> tuple[Experts, list[Task]] | None:
    """The experts of a set, and its tasks; None where an adapter is missing."""
    adapters = adapters_of(name, run.places, run.seed)
    return (Experts(base, adapters), tasks_of(name, run.places.data, run.plan.of_set(name))) if adapters else None


def _others(name: str, run: Run, experts: Experts, measuring: Measuring) -> Iterator[Column]:
    """What one could have instead of a composition; merges are tuned first."""
    skills = list(experts.adapters)
    tuned = measuring.tune(skills, development(run.places.data, skills, run.plan), experts.identity)
    with suppress(NotMeasuredError):  # then no strength is known
        yield from peer_columns(experts, run.plan.of_set(name), tuned, run.seed)
    yield from trained_column(experts, *_trained(name, run.places, run.seed))


def jobs_of(columns: Sequence[Column], tasks: Sequence[Task], measuring: Measuring) -> list[Callable[[], Any]]:
    """What there is to measure, in pieces that processes can share: what takes longest first."""
    writing = [
        partial(measuring.write, column, columns, part)
        for column in sorted(columns, key=lambda column: SLOW.get(column.kind, len(SLOW)))
        for part in parts_of(column, columns, tasks, measuring)
    ]
    return [*writing, *(partial(measuring.read, columns, task) for task in tasks if task.read)]


def parts_of(
    column: Column, columns: Sequence[Column], tasks: Sequence[Task], measuring: Measuring
) -> list[list[Task]]:
    """The tasks that a column writes for: where they take long one by one, so that each is kept; else all together."""
    own = [task for task in tasks if task.write and column in writers(columns, task)]
    return [[task] for task in own] if measuring.plan.at_once else [own] if own else []


def _measured(name: str, columns: Sequence[Column], tasks: Sequence[Task], measuring: Measuring) -> SetResult:
    """All cells of one set."""
    result = SetResult(name, columns)
    for task in tasks:
        if task.read:
            result.read[task.name] = measuring.read(columns, task)
        if task.write:
            result.written[task.name] = {}
    for column in columns:
        for part in parts_of(column, columns, tasks, measuring):
            with suppress(NotMeasuredError):
                (entries,) = measuring.each([partial(measuring.write, column, columns, part)])
                for task, entry in zip(part, entries, strict=True):
                    if entry is not None:
                        result.written[task.name][column.name] = entry
    return result


def writers(columns: Sequence[Column], task: Task) -> list[Column]:
    """Who writes for a task: all but the experts for other tasks. Where several skills are asked for, all experts."""
    alone = task.how == "skill"
    return [column for column in columns if column.kind != "expert" or not alone or column.name == task.name]


def adapters_of(name: str, places: Places, seed: int) -> dict[str, Path]:
    """The adapters of a set by name; empty where they are not there."""
    if name == "six-other":
        return places.others(seed + OTHER)
    if name == TWINS:
        other = places.extra("math", seed + 1)
        return {**adapters_of("five", places, seed), "math-too": other} if other else {}
    skills = {**SETS, **BLENDS, TWO: DOMAINS}[name]
    return {skill: places.adapters / skill for skill in skills}


def _trained(name: str, places: Places, seed: int) -> tuple[str, Path | None]:
    """The adapter trained on just this, and what its column is called."""
    if name in BLENDS:
        return "one LoRA on the blend", places.extra(f"blend-{BLENDS[name][0]}", seed)
    return ALL, places.extra("all", seed)


def tasks_of(name: str, data: Path, plan: Plan) -> list[Task]:
    """What is asked of a set."""
    if name == TWO:
        return [_two(data, pair, plan) for pair in PAIRS]
    if name == TWINS:
        return [_skill(data, "math", plan)]
    if name in BLENDS:
        skill = BLENDS[name][0]
        return [Task(name, (), read(data, skill, "test", plan.write), new_tokens(plan, skill), "blend")]
    return [*(_skill(data, skill, plan) for skill in SETS[name]), Task("plain", read(data, "plain", "test", plan.read))]


def _skill(data: Path, skill: str, plan: Plan) -> Task:
    written: Sequence[Example] = ()
    if skill in plan.writing:
        source = "humaneval" if skill == "code" else skill
        written = read(data, source, "test", plan.write)
        written = [function_prompt(example) for example in written] if skill == "code" else written
    return Task(skill, read(data, skill, "test", plan.read), written, new_tokens(plan, skill))


def _two(data: Path, pair: tuple[str, str], plan: Plan) -> Task:
    """Prompts that ask for one skill, then for another."""
    first, second = (read(data, skill, "test", plan.two) for skill in pair)
    asked = [
        Example(two_requests(a, b), "", {"parts": [(pair[0], a.answer), (pair[1], b.answer)]})
        for a, b in zip(first, second, strict=False)
    ]
    return Task(" then ".join(pair), (), asked, new_tokens(plan, *pair), "two")


def development(data: Path, skills: Sequence[str], plan: Plan) -> list[Task]:
    """Development prompts of the skills; code has none whose answers could be judged."""
    tasks = []
    for skill in (each for each in skills if each in SKILLS):
        examples = read(data, skill, "dev", plan.develop)
        written = examples if plan.develop_by_writing and skill != "code" else ()
        tasks.append(Task(skill, examples, written, new_tokens(plan, skill)))
    return tasks


def _texts(found: Sequence[SetResult], places: Places, plan: Plan) -> dict[str, Any]:
    """What columns wrote for the first prompts of each task."""
    shown: dict[str, Any] = {}
    for result in found:
        for task in tasks_of(result.name, places.data, plan.of_set(result.name)):
            for place, example in enumerate(task.write[:SHOWN]):
                texts = {name: entry["texts"][place][:400] for name, entry in result.written[task.name].items()}
                entry = {"prompt": example.prompt[:600], "answer": example.answer[:400], "texts": texts}
                shown.setdefault(result.name, {}).setdefault(task.name, []).append(entry)
    return shown
