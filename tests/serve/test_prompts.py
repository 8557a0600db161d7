"""Prompts that are too long, many at once, or of clients that have left: what is tokenised, and in which order."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tessellm.engine.engine import Engine
from tessellm.serve.prompts import Prompts
from tessellm.serve.refusals import Refusal
from tessellm.serve.scheduler import Scheduler
from tessellm.serve.schema import ChatRequest, CompletionRequest
from tessellm.serve.turns import Turns
from tessellm.text.lengths import USUAL


class Counting:
    """A tokenizer that takes its time and notes what it was given."""

    def __init__(self, seconds: float = 0.0):
        self.seconds, self.given, self.at_once = seconds, list[int](), 0
        self._one = threading.Lock()

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        assert self._one.acquire(blocking=False), "two threads at once"
        time.sleep(self.seconds)
        self.given.append(len(text))
        self._one.release()
        return {"input_ids": [1] * len(text.replace(" ", ""))}


def completion(prompt: Any, **options: Any) -> CompletionRequest:
    return CompletionRequest(model="tiny", prompt=prompt, **options)


def test_of_a_text_that_is_too_long_the_beginning_is_enough() -> None:
    tokenizer = Counting()
    prompts = Prompts(tokenizer, context=100, vocab_size=10, choices=4)
    with pytest.raises(Refusal, match="at least 800 tokens") as refused:
        asyncio.run(prompts.of_completion(completion("a" * 1_000_000)))
    assert refused.value.response.error.code == "context_length_exceeded"
    assert tokenizer.given == [USUAL * 100]
    spaces = " " * 3_000 + "abc"
    assert asyncio.run(prompts.of_completion(completion(spaces))) == [[1, 1, 1]]
    with pytest.raises(Refusal, match="fewer than 100 messages"):
        asyncio.run(prompts.of_chat(ChatRequest(model="tiny", messages=[{"role": "user", "content": "a"}] * 100)))


def test_short_prompts_do_not_wait_for_long_ones_and_who_has_left_is_forgotten() -> None:
    tokenizer = Counting(0.02)
    prompts = Prompts(tokenizer, context=1000, vocab_size=10, choices=4)

    async def work() -> None:
        sizes = (500, 400, 401, 402, 10, 300)
        tasks = [asyncio.create_task(prompts.of_completion(completion("a" * size))) for size in sizes]
        await asyncio.sleep(0.001)
        tasks[2].cancel()
        await asyncio.wait(tasks)
        assert tasks[2].cancelled()

    asyncio.run(work())
    assert tokenizer.given == [500, 10, 300, 400, 402]


def test_a_turn_that_comes_as_its_owner_leaves_goes_to_the_next() -> None:
    async def work() -> None:
        turns, order = Turns(), list[str]()
        first = asyncio.create_task(turns.run(1, lambda: order.append("first")))
        await asyncio.sleep(0)
        second = asyncio.create_task(turns.run(2, lambda: order.append("second")))
        third = asyncio.create_task(turns.run(3, lambda: order.append("third")))
        first.add_done_callback(lambda _: second.cancel())
        await asyncio.wait_for(third, 60)
        assert order == ["first", "third"]

    asyncio.run(work())


def test_prompts_that_are_made_ready_have_places_in_the_queue(composed: tuple[Any, Path]) -> None:
    scheduler = Scheduler(Engine(composed[0], slots=1), queue=2)
    with scheduler.place(2):
        assert not scheduler.full
        with pytest.raises(Refusal) as refused, scheduler.place(2):
            pass
        assert refused.value.status == 429
        with scheduler.place(1):
            assert scheduler.full
            assert scheduler.waiting == 3
    assert scheduler.held == 0
