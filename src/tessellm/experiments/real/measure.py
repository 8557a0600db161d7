"""Cells: what a column reads and writes of a task, kept in a journal as each is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from ...errors import EngineError
from ...evaluate.journal import Journal, key_of
from ...evaluate.writer import Ask, BlockWriter, Written
from ...model import ComposedForCausalLM
from ...text.options import TextOptions
from ...text.prompts import tokenizer_of
from .columns import Column, Make, routes
from .packing import Text
from .plan import Plan
from .programs import exit_codes
from .reading import Read, read_alone, read_together
from .skills import SKILLS, Example
from .tasks import PASSED, encode, judge, occurs, program, share_of_capitals

Log = Callable[[str], None]
Scores = dict[str, list[float]]  # by what is judged, prompt by prompt


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


@dataclass
class Measuring:
    """Measures cells, each once: what the journal has is not done again."""

    journal: Journal
    plan: Plan
    log: Log = print
    started: float = field(default_factory=time.monotonic)

    def _texts(self, model: ComposedForCausalLM, examples: Sequence[Example]) -> list[Text]:
        return encode(tokenizer_of(model), examples)

    def _tell(self, text: str) -> None:
        self.log(f"{time.monotonic() - self.started:.0f} s: {text}")

    def read(self, columns: Sequence[Column], task: Task) -> dict[str, Read]:
        """Likelihoods of the task's answers, by column; rules and members of one composition in one pass."""
        keys = {column.name: key_of("read", column.identity, _prompts(task.read)) for column in columns}
        missing = [column for column in columns if keys[column.name] not in self.journal]
        together = [column for column in missing if column.rule or column.member]
        if together:
            model = next((column.model for column in columns if column.rule), together[0].model)
            rules = {column.name: column.model.rule for column in together if column.rule}
            found = read_together(model, rules, self._texts(model, task.read), self.plan.numbers)
            for column in together:
                self._note(keys[column.name], found[column.member or column.name])
        for column in missing:
            if column not in together:
                self._note(keys[column.name], self._read_one(column, columns, task))
                column.release()
        if missing:
            self._tell(f"read {task.name}: {', '.join(column.name for column in missing)}")
        entries = {name: self.journal[key] for name, key in keys.items()}
        return {name: Read(entry["nats"], entry["tokens"]) for name, entry in entries.items()}

    def _note(self, key: str, read: Read) -> None:
        self.journal.add(key, nats=[round(each, 5) for each in read.nats], tokens=read.tokens)

    def _read_one(self, column: Column, columns: Sequence[Column], task: Task) -> Read:
        batch = self.plan.batch_size
        if column.kind != "router":
            return read_alone(column.model, self._texts(column.model, task.read), batch)
        experts = [each for each in columns if each.kind == "expert"]
        texts = self._texts(experts[0].model, task.read)
        found = self.read(experts, task)
        chosen = [experts[expert].name for expert in routes(experts, texts, batch)]
        return Read([found[name].nats[place] for place, name in enumerate(chosen)], found[chosen[0]].tokens)

    def write(self, column: Column, columns: Sequence[Column], task: Task) -> dict[str, Any] | None:
        """What a column writes for the task's prompts, judged: texts, scores, tokens, seconds. None: written, but it
        cannot be judged here."""
        key = key_of("written", column.identity, _prompts(task.write), task.new_tokens)
        if key not in self.journal:
            since = time.perf_counter()
            written = self.produce(column, columns, task)
            seconds, texts = time.perf_counter() - since, [each.text for each in written]
            self.journal.add(key, texts=texts, tokens=[each.tokens for each in written], seconds=seconds)
            self._tell(f"wrote {task.name}, {column.name} ({seconds:.0f} s)")
        entry = self.journal[key]
        scores = self._judged(key, task, entry["texts"])
        return None if scores is None else {**entry, "scores": scores}

    def _judged(self, key: str, task: Task, texts: Sequence[str]) -> Scores | None:
        """Scores of what was written under that key; programs are run once."""
        own = key_of("judged", key, task.how)
        if own not in self.journal:
            try:
                self.journal.add(own, scores=task.scores(texts))
            except EngineError as error:
                self._tell(f"{task.name} is not judged: {error}. Judge it elsewhere: run it again beside the journal")
                return None
        return self.journal[own]["scores"]

    def produce(self, column: Column, columns: Sequence[Column], task: Task) -> list[Written]:
        """Write for the task's prompts, whatever the journal has."""
        return self._route(columns, task) if column.kind == "router" else self._written(column.model, task)

    def _written(self, model: ComposedForCausalLM, task: Task, only: Sequence[int] | None = None) -> list[Written]:
        """All prompts' texts, or those of some of them."""
        examples = task.write if only is None else [task.write[number] for number in only]
        asks = [Ask(tuple(prompt), TextOptions(task.new_tokens)) for prompt, _ in self._texts(model, examples)]
        found = dict(BlockWriter(model, self.plan.batch_size, self.plan.engine, self.log).write(asks))
        return [found[number] for number in range(len(asks))]

    def _route(self, columns: Sequence[Column], task: Task) -> list[Written]:
        experts = [each for each in columns if each.kind == "expert"]
        chosen = routes(experts, self._texts(experts[0].model, task.write), self.plan.batch_size)
        found: dict[int, Written] = {}
        for number, expert in enumerate(experts):
            own = [place for place, each in enumerate(chosen) if each == number]
            if own:
                found |= dict(zip(own, self._written(expert.model, task, own), strict=True))
        return [found[place] for place in range(len(task.write))]

    def tune(self, experts: Sequence[str], tasks: Sequence[Task], identity: Any) -> Callable[..., float]:
        """A chooser of strengths: by what is written for development prompts, or by their likelihood, on the mean over
        the experts' own tasks; of equals the smaller strength."""
        own = [task for task in tasks if task.name in experts]
        if self.plan.develop_by_writing:
            own = [task for task in own if task.write] or own

        def choose(method: str, models: Mapping[float, Make]) -> float:
            found = {}
            for strength, make in models.items():
                column = Column(f"{method} λ={strength:g}", "merge", ["tuned", method, strength, identity], make)
                found[strength] = fmean(self._develop(column, task) for task in own)
                column.release()
            return max(found, key=lambda strength: (found[strength], -strength))

        return choose

    def _develop(self, column: Column, task: Task) -> float:
        if self.plan.develop_by_writing and task.write:
            written = self.write(column, [column], task)
            assert written is not None  # no task with development prompts needs programs to be run
            return fmean(written["scores"]["right"])
        return -self.read([column], task)[column.name].mean


def _prompts(examples: Sequence[Example]) -> str:
    return key_of([(example.prompt, example.answer) for example in examples])


def new_tokens(plan: Plan, *skills: str) -> int:
    """How long answers of these skills may get, one after the other."""
    wanted = sum(SKILLS[skill].new_tokens for skill in skills)
    return wanted if plan.new_tokens is None else min(wanted, plan.new_tokens)
