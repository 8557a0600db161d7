"""The server under load: time to first token and between tokens at 1, 16 and 64 clients; then 200 clients of which a
third hang up in the middle. A real process on this machine and tiny members, so that it is the server that is measured.

Writes results/serve-latency.json.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import httpx

from reference_overhead import RESULTS
from tessellm.engine.engine import Engine
from tessellm.engine.sampling import Sampling
from tessellm_lab.common.claims import Claim, Result, at_least, at_most

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from servers import Running, serving, tiny

NEW, PROMPTS = 48, 64
SECONDS, LOAD_SECONDS = 8.0, 60.0
CLIENTS, MANY = (1, 16, 64), 200


@dataclass
class Answer:
    """One streamed answer as its client saw it."""

    prompt: int
    text: str
    first: float  # seconds to the first piece
    gaps: list[float]  # between pieces
    whole: bool


def prompt(number: int) -> str:
    return f"{number}+{number * 7 % 31}="


async def ask(client: httpx.AsyncClient, number: int, leave_after: int | None = None) -> Answer:
    asked = {"model": "tiny", "prompt": prompt(number), "max_tokens": NEW, "temperature": 0, "stream": True}
    began, times, text = time.perf_counter(), [], ""
    async with client.stream("POST", "/v1/completions", json=asked) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line or line == "data: [DONE]":
                continue
            text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
            times.append(time.perf_counter())
            if leave_after is not None and len(times) >= leave_after:
                break
    gaps = [after - before for before, after in pairwise(times)]
    return Answer(number, text, times[0] - began, gaps, leave_after is None)


def clients(url: str, count: int, seconds: float, leave: Callable[[int], int | None]) -> tuple[list[Answer], float]:
    """So many clients, each asking again when it is done; all answers, and how long it took."""

    async def main() -> tuple[list[Answer], float]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=count)
        async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
            answers: list[Answer] = []
            began = time.perf_counter()

            async def one(number: int) -> None:
                turn = number
                while time.perf_counter() - began < seconds:
                    answers.append(await ask(client, turn % PROMPTS, leave(turn)))
                    turn += count

            await asyncio.gather(*(one(number) for number in range(count)))
            return answers, time.perf_counter() - began

    return asyncio.run(main())


def quantiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "median_ms": round(1000 * statistics.median(ordered), 2),
        "p95_ms": round(1000 * ordered[int(0.95 * (len(ordered) - 1))], 2),
    }


def latency(running: Running, count: int) -> dict[str, object]:
    answers, seconds = clients(running.url, count, SECONDS, lambda turn: None)
    return {
        "answers": len(answers),
        "tokens_per_second": round(sum(len(answer.text) for answer in answers) / seconds, 1),
        "first_token": quantiles([answer.first for answer in answers]),
        "between_tokens": quantiles([gap for answer in answers for gap in answer.gaps]),
    }


def resident_mib(process: int) -> float:
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def load(running: Running, expected: Sequence[str]) -> dict[str, float]:
    """Two hundred clients, every third of which hangs up after a few tokens."""
    before = resident_mib(running.process.pid)
    answers, _ = clients(running.url, MANY, LOAD_SECONDS, lambda turn: 1 + turn % 9 if turn % 3 == 0 else None)
    running.wait_until_idle()
    after = resident_mib(running.process.pid)
    whole = [answer for answer in answers if answer.whole]
    wrong = sum(answer.text != expected[answer.prompt] for answer in whole)
    return {
        "answers": len(whole),
        "hung_up": len(answers) - len(whole),
        "other_text": wrong / len(whole),
        "slots_left": running.metric("tessellm_slots_used"),
        "memory_mib": round(after, 1),
        "memory_growth_mib": round(after - before, 1),
    }


def main() -> None:
    start, others = time.perf_counter(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as place:
        home = Path(place)
        model, folder = tiny(home)
        rows = [model.tokenizer(prompt(number))["input_ids"] for number in range(PROMPTS)]
        alone = Engine(model, slots=1).generate(rows, Sampling(NEW))
        expected = [model.tokenizer.decode(request.tokens, skip_special_tokens=True) for request in alone]
        with serving(folder, home / "log.txt", "--slots", "16") as running:
            clients(running.url, 16, 2.0, lambda turn: None)  # warm
            tables: dict[str, dict] = {f"{count} clients": latency(running, count) for count in CLIENTS}
            tables["load"] = load(running, expected)
    tables["machine"] = {
        "cores": os.cpu_count(),
        "load_average_before": others,
        "load_average_after": os.getloadavg()[0],
    }
    speeds = [tables[f"{count} clients"]["tokens_per_second"] for count in CLIENTS]
    stressed = tables["load"]
    claims = [
        at_least("batching", "tokens a second with 16 clients over those with one", round(speeds[1] / speeds[0], 2), 4),
        at_most(
            "same-text", f"{MANY} clients: share of answers with another text than alone", stressed["other_text"], 0.01
        ),
        at_most("slots", f"{MANY} clients, a third hang up: slots that did not return", stressed["slots_left"], 0),
        at_most(
            "memory",
            f"{MANY} clients, a third hang up: share of its memory that the process grew by",
            round(stressed["memory_growth_mib"] / stressed["memory_mib"], 4),
            0.05,
        ),
    ]
    for count in CLIENTS:
        row = tables[f"{count} clients"]
        for key, name in (("first_token", "time to first token"), ("between_tokens", "time between tokens")):
            claims.append(Claim(f"{key}-{count}", f"{count} clients: {name}, median ms", row[key]["median_ms"]))
    result = Result("serve-latency", claims, 0, "cpu", round(time.perf_counter() - start, 1), tables=tables)
    result.write(RESULTS)
    for claim in claims:
        print(f"{claim.statement}: {claim.value}" + (f" (target {claim.target})" if claim.target else ""))


if __name__ == "__main__":
    main()
