"""Latency as users feel it: seconds to the first token and between tokens, from a process's start and in steady state.

A server is asked twice when it is new, then by as many clients at once as it has slots, which gives its throughput, and
then by users who come when they like: a Poisson process at some share of that throughput. Prompts are of several
lengths. A gap is what a client sees between two pieces of its stream. Knows a server's address, not what serves it.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from served import ServedModel
from streaming import TimedAnswer, ask
from tessellm.errors import EngineError

LIMIT = 3.0  # 99 % of gaps should be within so many medians
TOKENS_PER_WORD = 1.3
TEXT = (
    "The river runs past the old mill where the road bends to the north and a row of houses looks over the water. In "
    "spring the fields are flooded for some weeks and people cross them by boat to reach the market on the other side. "
    "Farmers bring bread, cheese, apples and wool, and children sell flowers that they have found along the way. When "
    "the sun goes down the boats return one after another, each with a small lamp at its bow, and from the hill it "
    "looks as if the stars had come down to the valley. My grandmother used to say that every lamp knows the way home."
)


@dataclass(frozen=True)
class LatencyPlan:
    """How a server is asked."""

    requests: int = 40  # per load
    new: int = 32  # tokens of an answer, at most
    prompts: Sequence[int] = (16, 32, 64, 128)  # tokens of the prompts, about
    loads: Sequence[float] = (0.5, 0.8)  # shares of the throughput
    slots: int = 4
    seed: int = 0
    texts: Sequence[str] = ()  # the prompts, in this order; without them they are made of words
    ignore_eos: bool = False  # answers go on past their end, so that all have `new` tokens

    def __post_init__(self) -> None:
        if min(self.requests, self.slots, *self.prompts) < 1 or self.new < 2:
            raise EngineError("expected at least one request, one slot, prompts of one token and answers of two")
        if not self.loads or min(self.loads) <= 0:
            raise EngineError(f"expected shares of the throughput above 0, such as 0.8; got {list(self.loads)}")

    @property
    def context(self) -> int:
        """Tokens that a slot must hold, with room for a tokenizer that needs more of them."""
        return 2 * max(self.prompts) + self.new + 32


def measure_latency(
    server: ServedModel, plan: LatencyPlan, progress: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Measure a server that has just become ready."""
    draw = random.Random(plan.seed)
    texts = iter(plan.texts) if plan.texts else _made(plan, draw)
    new = [asyncio.run(_ask(server, plan, next(texts))) for _ in range(2)]
    if not new[0].came:
        raise EngineError(f"{server.model} wrote nothing after {max(plan.prompts)} tokens: there is nothing to time")
    result: dict[str, Any] = {
        "ready_seconds": server.ready - server.began,
        "first_token_since_start_seconds": new[0].came[0] - server.began,
        "first_request": summary(new[:1]),
        "second_request": summary(new[1:]),
    }
    progress(f"ready after {result['ready_seconds']:.1f} s; first request: {in_words(result['first_request'])}")
    began = time.perf_counter()
    answers = asyncio.run(_closed(server, plan, texts))
    rate = len(answers) / (time.perf_counter() - began)
    result |= {"requests_per_second": rate, "all_slots": summary(answers)}
    progress(f"{rate:.3f} requests per second with {plan.slots} clients: {in_words(result['all_slots'])}")
    for load in plan.loads:
        answers = asyncio.run(_poisson(server, plan, rate * load, texts, draw))
        result[f"load_{load:g}"] = summary(answers)
        progress(f"at {load:.0%} of that: {in_words(result[f'load_{load:g}'])}")
    return result


def prompt_text(tokens: int, draw: random.Random) -> str:
    """Make a text of about so many tokens, which begins like no other."""
    words, count = TEXT.split(), max(1, round(tokens / TOKENS_PER_WORD) - 3)
    start = draw.randrange(len(words))
    return " ".join([f"{draw.randrange(10**6)}:", *(words * (2 + count // len(words)))[start : start + count]])


def _made(plan: LatencyPlan, draw: random.Random) -> Iterator[str]:
    """Make prompts: two long ones, then for every load each length as often as any other."""
    yield from (prompt_text(max(plan.prompts), draw) for _ in range(2))
    while True:
        lengths = [plan.prompts[number % len(plan.prompts)] for number in range(plan.requests)]
        draw.shuffle(lengths)
        yield from (prompt_text(tokens, draw) for tokens in lengths)


async def _ask(server: ServedModel, plan: LatencyPlan, text: str) -> TimedAnswer:
    body = {"model": server.model, "prompt": text, "max_tokens": plan.new, "temperature": 0}
    answer = await ask(server.url, body | ({"ignore_eos": True} if plan.ignore_eos else {}))
    if answer.error or answer.status not in (200, 429):
        raise EngineError(f"{server.model} answered with {answer.status}: {answer.error or 'see its log'}")
    return answer


async def _closed(server: ServedModel, plan: LatencyPlan, texts: Iterator[str]) -> list[TimedAnswer]:
    """Let as many clients as there are slots ask again as soon as they have an answer."""
    left, answers = list(islice(texts, plan.requests)), []

    async def client() -> None:
        while left:
            answers.append(await _ask(server, plan, left.pop(0)))

    await asyncio.gather(*(client() for _ in range(plan.slots)))
    return answers


async def _poisson(
    server: ServedModel, plan: LatencyPlan, rate: float, texts: Iterator[str], draw: random.Random
) -> list[TimedAnswer]:
    """Ask at random times, whoever is still waiting."""
    asked: list[Awaitable[TimedAnswer]] = []
    for text in islice(texts, plan.requests):
        await asyncio.sleep(draw.expovariate(rate))
        asked.append(asyncio.ensure_future(_ask(server, plan, text)))
    return list(await asyncio.gather(*asked))


def summary(answers: Sequence[TimedAnswer]) -> dict[str, Any]:
    """Put answers into numbers; milliseconds."""
    served = [answer for answer in answers if answer.came]
    gaps = [gap for answer in served for gap in answer.gaps]
    found = {
        "answers": len(served),
        "refused": sum(answer.status == 429 for answer in answers),
        "gaps": len(gaps),
        "first_token_ms": spread([answer.first for answer in served]),
        "gap_ms": spread(gaps),
    }
    if gaps:
        found["p99_over_median"] = found["gap_ms"]["p99"] / found["gap_ms"]["median"]  # type: ignore[index]
    return found


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Median, 99 % and largest, in milliseconds; nothing of nothing."""
    if not seconds:
        return {}
    ordered = sorted(1e3 * each for each in seconds)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return {"median": statistics.median(ordered), "p99": p99, "largest": ordered[-1]}


def in_words(row: dict[str, Any]) -> str:
    """A row as a line."""
    first, gaps = (
        ", ".join(f"{name} {value:,.0f}" for name, value in row[key].items()) for key in ("first_token_ms", "gap_ms")
    )
    within = f" (99 % within {row['p99_over_median']:.1f} medians)" if gaps else ""
    return f"first token, ms: {first}; gaps: {gaps or 'none'}{within}"
