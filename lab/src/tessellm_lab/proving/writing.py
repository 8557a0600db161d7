"""Answers of a composition, its experts, its base, Eq. 2 of some: by the library's engine, greedily, kept as they end.

An answer that one member writes alone is the same whoever asked for it: it is written once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tessellm.engine.engine import Engine
from tessellm.engine.requests import Request
from tessellm.engine.sampling import Sampling
from tessellm.evaluate.journal import Journal, key_of
from tessellm.model import ComposedForCausalLM

Log = Callable[[str], None]
SLOTS, CHUNK = 8, 48
NEW_TOKENS = {  # most answers end before; the reference answers are shorter
    "math": 144, "bash": 64, "intents": 80, "sql": 64, "code": 80, "advising": 112, "clinc": 12, "cogs": 112,
    "concepts": 40, "data2text": 64, "define": 32, "emotion": 8, "equation": 28, "fluent": 32, "isodate": 20,
    "medtopic": 24, "ner": 64, "regex": 48, "spanish": 48, "tldr": 40, "base": 48,
}  # fmt: skip


@dataclass(frozen=True)
class Job:
    """A prompt, how long its answer may be, and which experts write: None for as the composition routes."""

    ids: tuple[int, ...]
    new_tokens: int
    experts: tuple[str, ...] | None = None  # several: Eq. 2 of them; none: the base


@dataclass(frozen=True)
class Answer:
    """What was written, and by whom."""

    text: str
    active: tuple[str, ...]
    selected: str


class Answers:
    """Answers of one composition, kept in OUT/answers.jsonl."""

    def __init__(self, model: ComposedForCausalLM, identity: Any, out: Path, log: Log = print):
        self.model, self.log = model, log
        self._identity = key_of(identity)
        self._journal = Journal(out / "answers.jsonl")

    def of(self, jobs: Sequence[Job]) -> list[Answer]:
        """Return the answer of every job; those that are missing are written first."""
        self._write([job for job in dict.fromkeys(jobs) if job.experts is None])
        self._write([job for job in dict.fromkeys(jobs) if job.experts is not None])
        return [self._answer(job) for job in jobs]

    def _write(self, jobs: Sequence[Job]) -> None:
        missing = sorted((job for job in jobs if self._key(job) not in self._journal), key=lambda job: len(job.ids))
        if not missing:
            return
        context = max(len(job.ids) + job.new_tokens for job in missing)
        engine = Engine(self.model, SLOTS, context, compiled=False)
        for start in range(0, len(missing), CHUNK):
            chunk = missing[start : start + CHUNK]
            asked = {self._submitted(engine, job): job for job in chunk}
            while engine.busy:
                for request in engine.step():
                    if request.done:
                        self._keep(asked[request], request)
            self.log(f"{min(start + CHUNK, len(missing))} of {len(missing)} answers written")

    def _submitted(self, engine: Engine, job: Job) -> Request:
        names = None if job.experts is None else weights_of(job.experts, self.model)
        return engine.submit(job.ids, Sampling(job.new_tokens), names)

    def _keep(self, job: Job, request: Request) -> None:
        assert request.finish_reason != "error", request.error
        text = self.model.tokenizer.decode(request.tokens, skip_special_tokens=True)
        names = list(self.model.members)
        active = [names[number] for number in request.components.members] if request.components else []
        selected = request.route.selected if request.route else active[-1]
        found = {"text": text, "active": active, "selected": selected}
        self._journal.add(self._key(job), **found)
        if job.experts is None and len(active) == 1:  # what that member writes alone
            lone = Job(job.ids, job.new_tokens, tuple(name for name in active if name != "base"))
            if self._key(lone) not in self._journal:
                self._journal.add(self._key(lone), **found)

    def _answer(self, job: Job) -> Answer:
        entry = self._journal[self._key(job)]
        return Answer(entry["text"], tuple(entry["active"]), entry["selected"])

    def _key(self, job: Job) -> str:
        return key_of(self._identity, list(job.ids), job.new_tokens, None if job.experts is None else list(job.experts))


def weights_of(experts: Sequence[str], model: ComposedForCausalLM) -> Mapping[str, float]:
    """Return weights that make these experts the product, and leave all others out."""
    return {name: float(name in experts) for name in list(model.members)[1:]}


def composition_identity(experts: Mapping[str, Path], **settings: Any) -> list[Any]:
    """Return what a composition's answers depend on."""
    files = [
        [name, hashlib.sha256((path / "adapter_model.safetensors").read_bytes()).hexdigest()]
        for name, path in experts.items()
    ]
    return [files, sorted(settings.items())]
