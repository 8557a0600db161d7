"""A composition at work: its engine, the scheduler in front of it, and what requests may name.

A server has one at a time. Where experts come or go there is a new one; the old one finishes what it let in."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial

from anyio import to_thread

from ..engine.engine import Engine
from ..engine.memory import plan_slots
from ..engine.requests import Request
from ..errors import FastPathError
from ..model import ComposedForCausalLM
from ..text.prompts import tokenizer_of
from .prompts import Prompts
from .readiness import make_ready
from .scheduler import Scheduler
from .settings import Settings
from .targets import Targets

POLL_SECONDS = 0.05

Ended = Callable[[Sequence[str], Request], None]  # called with the members' names and a request that ended

log = logging.getLogger("tessellm.serve")


class RunningComposition:
    """One composition, its engine, and everyone whom it answers."""

    def __init__(self, model: ComposedForCausalLM, name: str, settings: Settings, ended: Ended):
        self.model, self.names = model, model.config.member_names
        self.targets = Targets(model, name)
        self.engine = _engine(model, settings)
        self.prepared = make_ready(self.engine, self.targets)
        self.scheduler = Scheduler(self.engine, settings.queue, partial(ended, self.names))
        choices = min(settings.choices, self.scheduler.room)
        size, ends = model.config.vocab_size, self.engine.ends
        self.prompts = Prompts(tokenizer_of(model), self.engine.context, size, choices, ends)

    def room(self, rows: Sequence[list[int]], wanted: int | None, default: int, param: str) -> list[int]:
        """Return how many tokens may follow each prompt; refuse what does not fit."""
        for row in rows:
            self.prompts.check_room(len(row), wanted or 1, param)
        return [wanted or min(default, self.engine.context - len(row)) for row in rows]

    async def finish(self) -> None:
        """Wait until all that was let in has ended, then let the engine's thread end."""
        while self.scheduler.open or self.scheduler.held:
            await asyncio.sleep(POLL_SECONDS)
        await to_thread.run_sync(self.scheduler.stop)


def _engine(model: ComposedForCausalLM, settings: Settings) -> Engine:
    """The fast path; members as they are where that was asked for, or where the fast path does not know them."""
    plan = plan_slots(model, settings.slots, settings.context)
    log.info("%s", plan)
    if not settings.plain:
        try:
            return Engine(model, plan.slots, plan.context, speculation=settings.speculation)
        except FastPathError as error:
            log.warning("%s", error)
            log.warning("serving members as they are: slower, and one sequence after another")
    return Engine(model, plan.slots, plan.context, plain=True)
