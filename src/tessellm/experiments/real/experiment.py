"""`reproduce real`: real adapters composed, merged and routed, judged by what they write and how they read.

What is measured is kept in `real/SIZE.jsonl`, cell by cell: a run that was stopped goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...evaluate.journal import Journal
from ...files import going_on
from ...members import Member
from ..lab.claims import Result
from ..lab.devices import device_for
from ..lab.panels import drawn
from .columns import ALL, Column, own_columns, peer_columns, trained_column
from .costs import costs_of
from .measure import Measuring, Task, new_tokens
from .members import Experts, Places, load_base
from .plan import BLENDS, PAIRS, PLANS, SETS, TWINS, TWO, Plan
from .results import SetResult, claims_of
from .skills import DOMAINS, SKILLS, Example, read
from .tasks import function_prompt, two_requests

Log = Callable[[str], None]
SHOWN = 2  # prompts per task whose texts the result shows


def run(seed: int, out: Path, size: str, log: Log = print) -> Result:
    """Claims, tables, and pictures in `out`."""
    return measure(Places.found(), PLANS[size], seed, out, size, log)


def measure(
    places: Places, plan: Plan, seed: int, out: Path, size: str, log: Log = print, device: str | None = None
) -> Result:
    """The same with places, a plan and a device of the caller's."""
    since, device = time.monotonic(), device or device_for(size)
    with going_on(out / "real"):
        base = load_base(places, device)
        measuring = Measuring(Journal(out / "real" / f"{size}.jsonl"), plan, log)
        found: list[SetResult] = []
        costs: dict[str, Any] = {}
        for name in plan.sets:
            made = _measured_set(name, places, base, measuring, seed)
            if made is None:
                log(f"{name}: left out, its adapters are not there")
                continue
            found.append(made)
            costs = costs or costs_of(made, tasks_of(name, places.data, plan), measuring)
            for column in made.columns:
                column.release()
    tables = {"sets": {each.name: each.table() for each in found}, "costs": costs, "texts": _texts(found, places, plan)}
    figures = drawn(lambda: _draw(tables, out)) if costs else []
    return Result("real", claims_of(tables, size == "full"), seed, size, time.monotonic() - since, figures, tables)


def _draw(tables: Mapping[str, Any], out: Path) -> str:
    from .figure import draw

    return draw(tables, out)


def _measured_set(name: str, places: Places, base: Member, measuring: Measuring, seed: int) -> SetResult | None:
    """All cells of one set; None where an adapter is missing."""
    adapters = adapters_of(name, places, seed)
    if not adapters:
        return None
    experts, plan = Experts(base, adapters), measuring.plan
    tasks = tasks_of(name, places.data, plan)
    tuned = measuring.tune(list(adapters), development(places.data, list(adapters), plan), experts.identity)
    columns = [
        *own_columns(experts, plan),
        *peer_columns(experts, plan, tuned, seed),
        *trained_column(experts, *_trained(name, places, seed)),
    ]
    result = SetResult(name, columns)
    for task in tasks:
        if task.read:
            result.read[task.name] = measuring.read(columns, task)
    for task in tasks:
        if task.write:
            cells = {column.name: measuring.write(column, columns, task) for column in writers(columns, task)}
            result.written[task.name] = {name: cell for name, cell in cells.items() if cell is not None}
    return result


def writers(columns: Sequence[Column], task: Task) -> list[Column]:
    """Who writes for a task: all but the experts for other tasks. Where several skills are asked for, all experts."""
    alone = task.how == "skill"
    return [column for column in columns if column.kind != "expert" or not alone or column.name == task.name]


def adapters_of(name: str, places: Places, seed: int) -> dict[str, Path]:
    """The adapters of a set by name; empty where they are not there."""
    if name == "six-other":
        return places.others(seed + 1)
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
        for task in tasks_of(result.name, places.data, plan):
            for place, example in enumerate(task.write[:SHOWN]):
                texts = {name: entry["texts"][place][:400] for name, entry in result.written[task.name].items()}
                entry = {"prompt": example.prompt[:600], "answer": example.answer[:400], "texts": texts}
                shown.setdefault(result.name, {}).setdefault(task.name, []).append(entry)
    return shown
