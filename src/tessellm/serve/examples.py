"""Examples: a user says who should have answered a prompt. What would change is shown before anything does."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

from anyio import to_thread
from pydantic import BaseModel, Field, StrictBool

from ..checkpoint.examples import save_examples
from ..errors import TessellmError, nearest, quoted
from ..model import ComposedForCausalLM
from ..model.routes import encode_prompt, read_rows
from ..routing.calibrated import prompts_of
from ..routing.one_example import retention, with_example
from ..routing.route import BASE, RoutedPrompt
from ..routing.router import DeltaRouter
from .refusals import Refusal, bad
from .schema import Strict, Words
from .service import Service

MOST = 256  # examples that are compared
MOST_WAITING = 16  # requests; each may take seconds
KEPT = 1024  # prompts of which it is kept what the base read


class ExampleRequest(Strict):
    member: Words
    prompt: str = Field(min_length=1, max_length=4000)
    save: StrictBool = False


class Moved(BaseModel):
    """A prompt, and who is selected for it without and with the new example."""

    prompt: str
    member: str  # that should answer it
    before: str
    after: str


class ExampleEffect(BaseModel):
    """What an example changes: at its own prompt, at the other examples, and on calibration prompts."""

    own: Moved
    share_before: float  # of the prior, the member's
    share_after: float
    others: int  # other examples that were compared
    moved: list[Moved]  # those for which another member is selected
    retention_before: float  # share of the calibration prompts that stay with the base
    retention_after: float
    saved: str | None = None  # where: the composition's folder, or this server alone


class Examples:
    """The examples of a running server's composition."""

    def __init__(self, service: Service, changing: asyncio.Lock):
        self.service, self._lock, self._waiting = service, changing, 0
        self._read = lru_cache(maxsize=KEPT)(_read)
        self._model: ComposedForCausalLM | None = None  # of which that is known

    async def add(self, asked: ExampleRequest) -> ExampleEffect:
        """Say what an example would change; with `save`, let it."""
        if asked.save and not self.service.settings.may_change:
            raise Refusal(
                403, "examples are not saved for clients of other machines; start the server with --runtime-updates"
            )
        if self._waiting >= MOST_WAITING:
            raise Refusal(429, "too many examples are being compared; come back later", headers={"Retry-After": "10"})
        self._waiting += 1
        try:
            async with self._lock:
                return await to_thread.run_sync(partial(self._added, self.service.model, asked))
        except TessellmError as error:
            raise bad(str(error)) from error
        finally:
            self._waiting -= 1

    def _added(self, model: ComposedForCausalLM, asked: ExampleRequest) -> ExampleEffect:
        before = model.router
        if not isinstance(before, DeltaRouter) or model.routing is None:
            raise bad("this composition has no router of ours, so examples change nothing", "member")
        known, names = examples_of(model), (BASE, *before.experts)
        if asked.member not in names:
            why = f"there is no member {quoted(asked.member)}; {nearest(asked.member, names)}"
            raise Refusal(404, why, "member", "model_not_found")
        if model is not self._model:
            self._read.cache_clear()
            self._model = model
        text = asked.prompt.strip()
        if text in known[asked.member]:
            raise bad(f"this is an example of {asked.member} already", "prompt")
        read = self._read(model, text)
        after = with_example(before, asked.member, text, read, model.base, model.tokenizer, prompts_of(model))
        effect = self._effect(model, before, after, asked.member, text)
        if asked.save:
            known[asked.member].append(text)
            effect.saved = _save(self.service.settings.folder, model, after, known)
        return effect

    def _effect(
        self, model: ComposedForCausalLM, before: DeltaRouter, after: DeltaRouter, member: str, text: str
    ) -> ExampleEffect:
        """Compare the routes of the prompt and of all examples by the two routers."""
        known = examples_of(model).items()
        asked = [(member, text), *((name, each) for name, texts in known for each in texts)][: MOST + 1]
        read = [self._read(model, each) for _, each in asked]
        routes = list(zip(before.route(read), after.route(read), strict=True))
        moved = [
            Moved(prompt=each, member=name, before=old.selected, after=new.selected)
            for (name, each), (old, new) in zip(asked, routes, strict=True)
        ]
        return ExampleEffect(
            own=moved[0],
            share_before=routes[0][0].prior[member],
            share_after=routes[0][1].prior[member],
            others=len(moved) - 1,
            moved=[each for each in moved[1:] if each.before != each.after],
            retention_before=retention(before),
            retention_after=retention(after),
        )


def examples_of(model: ComposedForCausalLM) -> dict[str, list[str]]:
    """Return every member's examples."""
    return {entry["name"]: list(entry.get("examples") or ()) for entry in model.config.members}


def _read(model: ComposedForCausalLM, text: str) -> RoutedPrompt:
    """Let the base read a prompt."""
    return read_rows(model, [encode_prompt(model, text, "the prompt")])[0]


def _save(folder: Path | None, model: ComposedForCausalLM, router: DeltaRouter, examples: dict[str, list[str]]) -> str:
    """Write examples to the composition's folder, if it came from one, then let the running composition go by them."""
    if folder is not None:
        save_examples(folder, router, examples)
    model.router = router
    for entry in model.config.members:
        entry["examples"] = examples[entry["name"]] or None
    model.loaded_members = tuple(
        replace(member, spec=replace(member.spec, examples=tuple(examples[member.name]) or None))
        for member in model.loaded_members
    )
    return "the composition's folder" if folder is not None else "this server, until it ends"
