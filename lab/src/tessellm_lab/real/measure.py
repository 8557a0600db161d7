"""Cells: what a column reads and writes of a task, kept in a journal as each is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from statistics import fmean
from typing import Any, TypeVar

from tessellm.errors import EngineError
from tessellm.evaluate.journal import key_of
from tessellm.evaluate.writer import Ask, BlockWriter, Written
from tessellm.model import ComposedForCausalLM
from tessellm.provenance import environment
from tessellm.text.options import TextOptions
from tessellm.text.prompts import tokenizer_of

from .columns import Column, Make, Tuned, routes
from .packing import Text
from .plan import Plan
from .programs import exit_codes
from .reading import Read, read_alone, read_together
from .shared import SharedJournal
from .skills import SKILLS, Example
from .tasks import PASSED, encode, judge, occurs, program, share_of_capitals

T = TypeVar("T")
Log = Callable[[str], None]
Asked = tuple[Example, int]  # and how many tokens the answer may have
Scores = dict[str, list[float]]  # by what is judged, prompt by prompt
READ_AT_ONCE = 64  # texts: all their logits are in memory
POLL = 0.2  # seconds between looks at what other processes have done


@dataclass(frozen=True)
class Task:
    """Prompts of one kind: answers that are read, prompts that are written for and how those are judged."""

    name: str
    read: Sequence[Example]
    write: Sequence[Example] = ()
    new_tokens: int = 64
    how: str = "skill"  # skill, blend (without case, and the share of capitals), two (both requests)

    def scores(self, texts: Sequence[str]) -> Scores:
        """Judge what was written for the prompts."""
        pairs = list(zip(texts, self.write, strict=True))
        if self.how == "two":
            return _both(pairs)
        skill = self.name.partition("+")[0]
        if skill == "code":
            codes = exit_codes([program(example, text) for text, example in pairs])
            return {"right": [float(code == PASSED) for code in codes]}
        fold = self.how == "blend"
        right = [judge(skill, text, example.answer, fold) for text, example in pairs]
        return _blended(right, texts) if fold else {"right": right}


def _blended(right: list[float], texts: Sequence[str]) -> Scores:
    """Whether the answer is right, how much of it is in capitals, and the product."""
    capitals = [share_of_capitals(text) for text in texts]
    return {"right": [a * b for a, b in zip(right, capitals, strict=True)], "without case": right, "capitals": capitals}


def _both(pairs: Sequence[tuple[str, Example]]) -> Scores:
    found: Scores = {"first": [], "second": []}
    for text, example in pairs:
        for part, (skill, answer) in zip(found.values(), example.facts["parts"], strict=True):
            part.append(occurs(skill, text, answer))
    return {"right": [a * b for a, b in zip(*found.values(), strict=True)], **found}


class BusyError(Exception):
    """Another process is measuring this."""


class NotMeasuredError(Exception):
    """The journal lacks this, and nothing is to be measured."""


@dataclass
class Measuring:
    """Measures cells, each once: what the journal has is not done again, nor what another process is at."""

    journal: SharedJournal
    plan: Plan
    log: Log = print
    frozen: bool = False  # nothing is measured
    started: float = field(default_factory=time.monotonic)

    def _texts(self, model: ComposedForCausalLM, examples: Sequence[Example]) -> list[Text]:
        return encode(tokenizer_of(model), examples)

    def _tell(self, text: str) -> None:
        self.log(f"{time.monotonic() - self.started:.0f} s: {text}")

    def sign(self) -> None:
        """Note in the journal what this process measures on."""
        here = environment("peft")
        if (key := key_of("measured on", here)) not in self.journal:
            self.journal.add(key, measured_on=here)

    @property
    def measured_on(self) -> list[dict[str, Any]]:
        """Commits, versions and hardware of all processes that measured."""
        return [entry["measured_on"] for entry in self.journal.entries.values() if "measured_on" in entry]

    @property
    def seconds(self) -> float:
        """That all processes together spent on writing."""
        return sum(entry.get("seconds", 0.0) for entry in self.journal.entries.values())

    def each(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        """What jobs give, in their order: first those that no other process is at."""
        found: dict[int, T] = {}
        while len(found) < len(jobs):
            before = len(found)
            for place, job in enumerate(jobs):
                if place not in found:
                    with suppress(BusyError):
                        found[place] = job()
            if len(found) == before:
                time.sleep(POLL)
        return [found[place] for place in range(len(jobs))]

    def _once(self, keys: Sequence[str], measure: Callable[[], None]) -> None:
        """Measure what has these keys, if the journal lacks one of them; BusyError where another process is at it."""
        if all(key in self.journal for key in keys):
            return
        if self.frozen:
            raise NotMeasuredError
        with self.journal.taken(key_of(keys)) as mine:
            if not mine:
                raise BusyError
            if not all(key in self.journal for key in keys):
                measure()

    def read(self, columns: Sequence[Column], task: Task) -> dict[str, Read]:
        """Likelihoods of the task's answers, by column; rules and members of one composition in one pass. Without
        those that are not known, where nothing is measured."""
        together = [column for column in columns if column.rule or column.member]
        apart = [[column] for column in columns if column not in together]
        jobs = [partial(self._known, group, columns, task) for group in (together, *apart) if group]
        found = {name: read for part in self.each(jobs) for name, read in part.items()}
        return {column.name: found[column.name] for column in columns if column.name in found}

    def _known(self, group: Sequence[Column], columns: Sequence[Column], task: Task) -> dict[str, Read]:
        try:
            return self._read_once(group, columns, task)
        except NotMeasuredError:
            return {}

    def _read_once(self, group: Sequence[Column], columns: Sequence[Column], task: Task) -> dict[str, Read]:
        """Of one column, or of several of one composition."""
        keys = {column.name: key_of("read", column.identity, _prompts(task.read)) for column in group}

        def measure() -> None:
            missing = [column for column in group if keys[column.name] not in self.journal]
            found = self._read_together(group, missing, task) if len(group) > 1 or group[0].rule else None
            for column in missing:
                read = found[column.member or column.name] if found else self._read_one(column, columns, task)
                nats = [round(each, 5) for each in read.nats]
                self.journal.add(keys[column.name], nats=nats, tokens=read.tokens)
            self._tell(f"read {task.name}: {', '.join(column.name for column in missing)}")

        self._once(list(keys.values()), measure)
        entries = {name: self.journal[key] for name, key in keys.items()}
        return {name: Read(entry["nats"], entry["tokens"]) for name, entry in entries.items()}

    def _read_together(self, group: Sequence[Column], missing: Sequence[Column], task: Task) -> dict[str, Read]:
        """By the missing rules of the group, and by all its members."""
        model = next((column.model for column in group if column.rule), group[0].model)
        rules = {column.name: column.model.rule for column in missing if column.rule}
        return read_together(model, rules, self._texts(model, task.read), self.plan.numbers)

    def _read_one(self, column: Column, columns: Sequence[Column], task: Task) -> Read:
        batch = min(self.plan.batch_size, READ_AT_ONCE)
        if column.kind != "router":
            found = read_alone(column.model, self._texts(column.model, task.read), batch)
            column.release()
            return found
        experts = [each for each in columns if each.kind == "expert"]
        texts = self._texts(experts[0].model, task.read)
        each = self.read([column for column in columns if column.rule or column.member], task)
        chosen = [experts[expert].name for expert in routes(experts, texts, batch)]
        return Read([each[name].nats[place] for place, name in enumerate(chosen)], each[chosen[0]].tokens)

    def write(self, column: Column, columns: Sequence[Column], tasks: Sequence[Task]) -> list[dict[str, Any] | None]:
        """What a column writes for the tasks' prompts, all together, judged: texts, scores, tokens, seconds. None:
        written, but it cannot be judged here."""
        keys = [key_of("written", column.identity, _prompts(task.write), task.new_tokens) for task in tasks]

        def measure() -> None:
            missing = [(key, task) for key, task in zip(keys, tasks, strict=True) if key not in self.journal]
            since = time.perf_counter()
            written = self.produce(column, columns, [task for _, task in missing])
            seconds = time.perf_counter() - since
            total = sum(each.tokens for texts in written for each in texts)
            for (key, _), texts in zip(missing, written, strict=True):
                tokens = [each.tokens for each in texts]
                share = seconds * sum(tokens) / max(1, total)
                self.journal.add(key, texts=[each.text for each in texts], tokens=tokens, seconds=share)
            self._tell(f"wrote {', '.join(task.name for _, task in missing)}: {column.name} ({seconds:.0f} s)")

        self._once(keys, measure)
        return [self._judged(key, task) for key, task in zip(keys, tasks, strict=True)]

    def _judged(self, key: str, task: Task) -> dict[str, Any] | None:
        """What was written under that key with its scores; programs are run once."""
        own, entry = key_of("judged", key, task.how), self.journal[key]
        if own not in self.journal:
            try:
                self.journal.add(own, scores=task.scores(entry["texts"]))
            except EngineError as error:
                self._tell(f"{task.name} is not judged: {error}. Judge it elsewhere: run it again beside the journal")
                return None
        return {**entry, "scores": self.journal[own]["scores"]}

    def produce(self, column: Column, columns: Sequence[Column], tasks: Sequence[Task]) -> list[list[Written]]:
        """Write for the tasks' prompts, whatever the journal has."""
        asked = [(example, task.new_tokens) for task in tasks for example in task.write]
        found = self._route(columns, asked) if column.kind == "router" else self._written(column, asked)
        behind = iter(found)
        return [list(islice(behind, len(task.write))) for task in tasks]

    def _written(self, column: Column, asked: Sequence[Asked]) -> list[Written]:
        texts = self._texts(column.model, [example for example, _ in asked])
        asks = [Ask(tuple(prompt), TextOptions(new)) for (prompt, _), (_, new) in zip(texts, asked, strict=True)]
        by = ("reference", self.plan.at_once) if self.by_reference(column) else ("auto", self.plan.batch_size)
        found = dict(BlockWriter(column.model, by[1], by[0], self.log).write(asks))
        return _checked([found[number] for number in range(len(asks))], column.name)

    def by_reference(self, column: Column) -> bool:
        """Whether many prompts of a task are written for together, as one model does best: its steps are launches, and
        the reference has as few of them as an engine that takes fewer prompts at once."""
        return self.plan.at_once > 0 and column.rule is None

    def _route(self, columns: Sequence[Column], asked: Sequence[Asked]) -> list[Written]:
        experts = [each for each in columns if each.kind == "expert"]
        texts = self._texts(experts[0].model, [example for example, _ in asked])
        chosen = routes(experts, texts, min(self.plan.batch_size, READ_AT_ONCE))
        found: dict[int, Written] = {}
        for number, expert in enumerate(experts):
            own = [place for place, each in enumerate(chosen) if each == number]
            if own:
                found |= dict(zip(own, self._written(expert, [asked[place] for place in own]), strict=True))
        return [found[place] for place in range(len(asked))]

    def tune(self, experts: Sequence[str], tasks: Sequence[Task], identity: Any) -> Tuned:
        """A chooser of strengths: by what is written for development prompts, or by their likelihood, on the mean over
        the experts' own tasks; of equals the smaller strength."""
        own = [task for task in tasks if task.name in experts]
        if self.plan.develop_by_writing:
            own = [task for task in own if task.write] or own

        def choose(models: Mapping[str, Mapping[float, Make]]) -> dict[str, float]:
            tried = [(method, strength, make) for method, by in models.items() for strength, make in by.items()]
            columns = [
                Column(f"{method} λ={strength:g}", "merge", ["tuned", method, strength, identity], make)
                for method, strength, make in tried
            ]
            means = self.each([partial(self._develop, column, own) for column in columns])
            found = [(mean, -strength, method) for mean, (method, strength, _) in zip(means, tried, strict=True)]
            return {method: -max(each[:2] for each in found if each[2] == method)[1] for method in models}

        return choose

    def _develop(self, column: Column, tasks: Sequence[Task]) -> float:
        """How good a column is on the mean over development tasks."""
        written = [task for task in tasks if task.write] if self.plan.develop_by_writing else []
        entries = self.write(column, [column], written) if written else []
        scores = [fmean(entry["scores"]["right"]) for entry in entries if entry is not None]
        scores += [-self.read([column], task)[column.name].mean for task in tasks if task not in written]
        column.release()
        return fmean(scores)


def _checked(written: list[Written], name: str) -> list[Written]:
    """What was written, if every prompt was: one that failed, as where memory ran out, is no wrong answer."""
    failed = [each.error for each in written if each.error is not None]
    if failed:
        raise EngineError(f"{name}: {len(failed)} of {len(written)} prompts failed, the first since {failed[0]}")
    return written


def _prompts(examples: Sequence[Example]) -> str:
    return key_of([(example.prompt, example.answer) for example in examples])


def new_tokens(plan: Plan, *skills: str) -> int:
    """How long answers of these skills may get, one after the other."""
    wanted = sum(SKILLS[skill].new_tokens for skill in skills)
    return wanted if plan.new_tokens is None else min(wanted, plan.new_tokens)
