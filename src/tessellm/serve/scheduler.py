"""Scheduler: one thread owns the writer and steps it. Requests come in by a queue, tokens leave to the event loop.

First come, first served. All but `_run` and what it calls belongs to the event loop's thread; between the two there are
only the inbox and `call_soon_threadsafe`. Knows token ids, not texts.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from ..engine.engine import Engine
from ..engine.requests import Request
from ..text.stops import StopFinder
from ..text.writer import Ordered, Writer
from .refusals import busy, unavailable

Result = TypeVar("Result")

log = logging.getLogger("tessellm.serve")


@dataclass(frozen=True)
class News:
    """What has come of a request since the last news."""

    tokens: list[int]
    logprobs: list[float]
    seen: list[dict[str, Any]]
    finish_reason: str | None = None  # the engine's, timeout, or stopping
    error: str | None = None


@dataclass(eq=False)
class Job:
    """A request with its deadline, and the queue that its news go to, under its number."""

    request: Request
    stops: StopFinder | None
    number: int
    deadline: float
    news: asyncio.Queue[tuple[int, News]]
    told: int = 0  # tokens that were passed on
    closed: bool = False


class Scheduler:
    """Slots and a bounded queue in front of them."""

    def __init__(self, engine: Engine, queue: int, ended: Callable[[Request], None] = lambda request: None):
        self.engine, self.writer, self.room = engine, Writer(engine), len(engine.in_slot) + queue
        self.open = 0  # requests that were let in and have not ended
        self.held = 0  # places for requests whose prompts are being made ready
        self.failure: str | None = None
        self.end = math.inf  # nobody is served any longer than this
        self._ended = ended
        self._inbox: SimpleQueue[tuple[str, Any]] = SimpleQueue()
        self._jobs: dict[Request, Job] = {}  # the engine thread's
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread.start()

    def stop(self) -> None:
        """Let the thread end. What is still open is dropped: drain first."""
        self._inbox.put(("stop", None))
        self._thread.join()

    @contextmanager
    def place(self, count: int) -> Iterator[None]:
        """Hold so many places of the queue while prompts are made ready; `submit`, inside of it, takes them over."""
        self._check_room(self.open + self.held + count)
        self.held += count
        try:
            yield
        finally:
            self.held -= count

    def _check_room(self, needed: int) -> None:
        if self.failure:
            raise unavailable(f"the engine has failed: {self.failure}")
        if needed > self.room:
            raise busy(self._retry_after())

    @property
    def full(self) -> bool:
        return self.open + self.held >= self.room

    def submit(self, requests: Sequence[Ordered], seconds: float) -> list[Job]:
        """Let requests in, all or none. They share one queue of news."""
        self._check_room(self.open + len(requests))
        self.open += len(requests)
        news: asyncio.Queue[tuple[int, News]] = asyncio.Queue()
        deadline = time.monotonic() + seconds
        jobs = [Job(*request, number, deadline, news) for number, request in enumerate(requests)]
        for job in jobs:
            self._inbox.put(("enter", job))
        return jobs

    def cancel(self, job: Job) -> None:
        """Drop a request; its slot is free before the next step."""
        if not job.closed:
            self._inbox.put(("cancelled", job))

    async def between_steps(self, work: Callable[[], Result]) -> Result:
        """Do something in the engine's thread; all that run wait for it."""
        assert self._loop is not None
        loop, done = self._loop, self._loop.create_future()

        def finish(outcome: Callable[[], Any]) -> None:
            if not done.done():
                outcome()

        def run() -> None:
            try:
                result = work()
            except Exception as error:
                loop.call_soon_threadsafe(finish, partial(done.set_exception, error))
            else:
                loop.call_soon_threadsafe(finish, partial(done.set_result, result))

        self._inbox.put(("work", run))
        found: Result = await done
        return found

    @property
    def waiting(self) -> int:
        return max(0, self.open + self.held - self.running)

    @property
    def running(self) -> int:
        return sum(request is not None for request in self.engine.in_slot)

    def _retry_after(self) -> int:
        """Estimate the seconds until a slot is free from how many requests wait for each."""
        return max(1, min(60, self.open // (2 * len(self.engine.in_slot))))

    def _run(self) -> None:
        try:
            while self._take_orders():
                self._expire()
                if self.engine.busy:
                    self._tell(self.writer.step())
        except Exception as error:
            log.exception("the engine has failed")
            self.failure = f"{type(error).__name__}: {error}"
            self._post([(job, News([], [], [], "error", self.failure)) for job in self._jobs.values()])
            self._refuse_all()

    def _take_orders(self) -> bool:
        """Let in and drop what was asked for since the last step; wait where there is nothing to do."""
        while not self._inbox.empty() or not self.engine.busy:
            order, job = self._inbox.get()
            if job is None:
                return False
            if order == "work":
                job()
            elif order == "enter":
                self._jobs[job.request] = job
                self.writer.enter(job.request, job.stops)
            elif job.request in self._jobs:
                self._drop(job, order)
        return True

    def _expire(self) -> None:
        now = time.monotonic()
        for job in [job for job in self._jobs.values() if now > min(job.deadline, self.end)]:
            self._drop(job, "timeout" if now > job.deadline else "stopping")

    def _drop(self, job: Job, reason: str) -> None:
        self.writer.cancel(job.request, reason)
        del self._jobs[job.request]
        self._post([(job, News([], [], [], reason))])

    def _tell(self, arrived: Sequence[Request]) -> None:
        news = []
        for request in arrived:
            job = self._jobs.get(request)
            if job is None:
                continue
            new = slice(job.told, len(request.tokens))
            job.told = len(request.tokens)
            said = request.tokens[new], request.logprobs[new], request.seen[new]
            news.append((job, News(*said, request.finish_reason, request.error)))
            if request.done:
                del self._jobs[request]
        self._post(news)

    def _post(self, news: list[tuple[Job, News]]) -> None:
        assert self._loop is not None
        if news and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._hand_out, news)

    def _hand_out(self, news: list[tuple[Job, News]]) -> None:
        for job, each in news:
            job.news.put_nowait((job.number, each))
            if each.finish_reason and not job.closed:
                job.closed = True
                self.open -= 1
                self._ended(job.request)

    def _refuse_all(self) -> None:
        """Answer what still comes in after a failure."""
        while True:
            order, job = self._inbox.get()
            if job is None:
                return
            if order == "work":
                job()
            elif order == "enter":
                self._post([(job, News([], [], [], "error", self.failure))])
