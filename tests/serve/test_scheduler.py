"""One engine thread and many who ask: order, bounds, leaving, time, failure."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tessellm.engine.engine import Engine
from tessellm.engine.requests import Request
from tessellm.engine.sampling import Sampling
from tessellm.serve.choices import RunningChoice
from tessellm.serve.refusals import Refusal
from tessellm.serve.scheduler import Job, Scheduler
from tessellm.text.stops import StopFinder
from tessellm.text.stream import TextStream

from decoding_cases import prompts


@pytest.fixture(scope="module")
def model(composed: tuple[Any, Path]) -> Any:
    return composed[0]


def run(engine: Engine, queue: int, work: Callable[[Scheduler], Awaitable[None]]) -> None:
    async def main() -> None:
        scheduler = Scheduler(engine, queue)
        scheduler.start(asyncio.get_running_loop())
        try:
            await asyncio.wait_for(work(scheduler), 60)
        finally:
            scheduler.stop()

    asyncio.run(main())


def slowed(engine: Engine, seconds: float) -> Engine:
    step = engine.step

    def slow() -> Any:
        time.sleep(seconds)
        return step()

    engine.step = slow  # type: ignore[method-assign]
    return engine


def asked(engine: Engine, text: list[int], new: int) -> Any:
    return engine.limits.check(Request(text, Sampling(new, ignore_end=True))), None


async def whole(job: Job) -> tuple[list[int], str]:
    tokens: list[int] = []
    while True:
        _, news = await job.news.get()
        tokens += news.tokens
        if news.finish_reason:
            return tokens, news.finish_reason


def test_everyone_gets_what_the_engine_writes_alone(model: Any) -> None:
    engine, texts = Engine(model, slots=3), prompts(9, longest=30)
    expected = [r.tokens for r in Engine(model, slots=1).generate(texts, Sampling(10, ignore_end=True))]

    async def work(scheduler: Scheduler) -> None:
        jobs = [scheduler.submit([asked(engine, text, 10)], 60)[0] for text in texts]
        assert [await whole(job) for job in jobs] == [(tokens, "length") for tokens in expected]
        assert scheduler.open == scheduler.running == scheduler.waiting == 0

    run(engine, 9, work)


def test_first_come_first_served_and_no_more_than_there_is_room_for(model: Any) -> None:
    engine = slowed(Engine(model, slots=1), 0.005)
    order: list[int] = []

    async def work(scheduler: Scheduler) -> None:
        jobs = [scheduler.submit([asked(engine, [5 + n], 4)], 60)[0] for n in range(4)]
        with pytest.raises(Refusal) as refused:
            scheduler.submit([asked(engine, [5], 4)], 60)
        assert refused.value.status == 429
        assert int(refused.value.headers["Retry-After"]) >= 1

        async def note(number: int) -> None:
            await whole(jobs[number])
            order.append(number)

        await asyncio.gather(*(note(number) for number in reversed(range(4))))
        scheduler.submit([asked(engine, [5], 1)], 60)

    run(engine, 3, work)
    assert order == [0, 1, 2, 3]


def test_who_leaves_frees_the_slot_before_the_next_step(model: Any) -> None:
    engine = slowed(Engine(model, slots=1), 0.01)

    async def work(scheduler: Scheduler) -> None:
        first, second = scheduler.submit([asked(engine, [5], 100), asked(engine, [6], 3)], 60)
        assert first.news is second.news
        number, news = await first.news.get()
        assert (number, len(news.tokens)) == (0, 1)  # its prompt was read
        scheduler.cancel(first)
        ended: list[tuple[int, str]] = []
        while len(ended) < 2:
            number, news = await first.news.get()
            ended += [(number, news.finish_reason)] if news.finish_reason else []
        assert ended == [(0, "cancelled"), (1, "length")]
        assert len(first.request.tokens) <= 5  # it had a hundred to write
        scheduler.cancel(first)
        await asyncio.sleep(0.1)
        assert scheduler.open == 0

    run(engine, 1, work)


def test_a_stop_text_ends_a_request_with_the_token_that_completes_it(model: Any) -> None:
    (free,) = Engine(model, slots=1).generate([[5, 6]], Sampling(10, ignore_end=True))
    stop = model.tokenizer.decode(free.tokens[1:3], skip_special_tokens=True)
    engine = Engine(model, slots=1)

    async def work(scheduler: Scheduler) -> None:
        request, _ = asked(engine, [5, 6], 10)
        (job,) = scheduler.submit([(request, StopFinder(model.tokenizer, [stop], request.prompt))], 60)
        assert await whole(job) == (free.tokens[:3], "stop")
        assert engine.in_slot == [None]

    run(engine, 1, work)


def test_time_runs_out_for_who_runs_and_who_waits(model: Any) -> None:
    engine = slowed(Engine(model, slots=1), 0.02)

    async def work(scheduler: Scheduler) -> None:
        running = scheduler.submit([asked(engine, [5], 100)], 0.3)[0]
        waiting = scheduler.submit([asked(engine, [6], 100)], 0.1)[0]
        tokens, reason = await whole(waiting)
        assert (tokens, reason) == ([], "timeout")
        tokens, reason = await whole(running)
        assert 1 <= len(tokens) < 100
        assert reason == running.request.finish_reason == "timeout"
        assert scheduler.open == 0
        assert engine.in_slot == [None]

    run(engine, 1, work)


def test_a_server_that_stops_tells_those_for_whom_there_is_no_time(model: Any) -> None:
    engine = slowed(Engine(model, slots=1), 0.02)

    async def work(scheduler: Scheduler) -> None:
        jobs = [scheduler.submit([asked(engine, [5 + n], 100)], 60)[0] for n in range(2)]
        await jobs[0].news.get()
        scheduler.end = time.monotonic() + 0.1
        for job in jobs:
            written = RunningChoice(job, TextStream(model.tokenizer), frozenset(), 60)
            while (news := (await job.news.get())[1]).finish_reason is None:
                written.read(news)
            with pytest.raises(Refusal, match="told to stop") as refused:
                written.read(news)
            assert refused.value.status == 503
            assert job.request.finish_reason == "stopping"
        assert scheduler.open == 0

    run(engine, 1, work)


def test_a_failure_is_told_to_everyone_and_nobody_else_is_let_in(model: Any) -> None:
    engine = Engine(model, slots=1)
    engine.step = lambda: 1 / 0  # type: ignore[method-assign, assignment, return-value]

    async def work(scheduler: Scheduler) -> None:
        jobs = scheduler.submit([asked(engine, [5], 4), asked(engine, [6], 4)], 60)
        _, news = await jobs[0].news.get()
        assert news.finish_reason == "error"
        assert "division by zero" in str(news.error)
        with pytest.raises(Refusal, match="division by zero") as refused:
            scheduler.submit([asked(engine, [5], 4)], 60)
        assert refused.value.status == 503

    run(engine, 4, work)


def test_what_is_done_between_steps_changes_no_text(model: Any) -> None:
    engine, text = slowed(Engine(model, slots=1), 0.005), prompts(1, longest=30)[0]
    (expected,) = Engine(model, slots=1).generate([text], Sampling(20, ignore_end=True))

    async def work(scheduler: Scheduler) -> None:
        (job,) = scheduler.submit([asked(engine, text, 20)], 60)
        await job.news.get()
        assert await scheduler.between_steps(threading.current_thread) is not threading.current_thread()
        with pytest.raises(ZeroDivisionError):
            await scheduler.between_steps(lambda: 1 / 0)
        assert (await whole(job))[1] == "length"
        assert job.request.tokens == expected.tokens
        assert await scheduler.between_steps(lambda: 3) == 3  # also of one that has nothing to do

    run(engine, 1, work)
