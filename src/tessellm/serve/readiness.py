"""Make a server ready: what its requests can meet is compiled, captured and run once before the server listens, so that
the first request takes no longer than the next. Knows what requests may be for; the engine prepares its forwards."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable

from ..engine.engine import Engine
from ..engine.preparation import Prepared, prepare
from ..engine.requests import Request
from ..engine.sampling import Sampling
from .targets import Targets, top

TOKENS, NEW = 8, 2  # of the requests that are tried
TOLD_EVERY = 5.0  # seconds

log = logging.getLogger("tessellm.serve")


def make_ready(engine: Engine, targets: Targets) -> Prepared:
    """Try the composition traced and a member watched, which take other paths than most; prepare the rest. From
    then on prompts are read in pieces while others are written to."""
    room = engine.context - 1
    prompt, sampling = [0] * min(TOKENS, room), Sampling(min(NEW, room), ignore_end=True)
    own, member = targets.find(targets.name), targets.find(targets.names[-1])
    watched = [(own, own.trace), (member, top)] if len(targets.members) > 1 else [(own, top)]
    tried = [Request(prompt, sampling, target.experts, observer, observer is not top) for target, observer in watched]
    gc.freeze()  # what was loaded: compiling makes so many objects that all would be looked through again and again
    prepared = prepare(engine, tried, _progress())
    engine.controller.keep_pace(engine.executor.chunk_seconds())
    log.info("ready: %d compiled or captured in %.1f s", prepared.made, prepared.seconds)
    return prepared


def _progress() -> Callable[[int, int], None]:
    """Log how far preparing is, now and then."""
    last = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last > TOLD_EVERY:
            last = time.monotonic()
            log.info("%d of %d passes are compiled and captured", done, total)

    return tell
