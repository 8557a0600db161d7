"""Many clients at once, clients that are killed, and a server that is told to stop while it is busy."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tessellm.decoding.engine import Engine
from tessellm.decoding.sampling import Sampling

from servers import Running, serving

CLIENTS, NEW = 48, 24


def prompt(number: int) -> str:
    return f"{number}+{number * 7 % 31}="


@pytest.fixture(scope="module")
def expected(composed: tuple[Any, Path]) -> list[str]:
    """What the engine writes for each, one at a time."""
    model, tokenizer = composed[0], composed[0].tokenizer
    rows = [tokenizer(prompt(number))["input_ids"] for number in range(CLIENTS)]
    requests = Engine(model, slots=1).generate(rows, Sampling(NEW))
    return [tokenizer.decode(request.tokens, skip_special_tokens=True) for request in requests]


async def stream(client: httpx.AsyncClient, number: int, leave_after: int | None = None) -> str | None:
    """A client's text; None if it was refused. It may hang up after some pieces."""
    asked = {"model": "tiny", "prompt": prompt(number), "max_tokens": NEW, "temperature": 0, "stream": True}
    text, pieces = "", 0
    async with client.stream("POST", "/v1/completions", json=asked) as answer:
        if answer.status_code == 429:
            assert int(answer.headers["retry-after"]) >= 1
            return None
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                return text
            if line:
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                pieces += 1
            if leave_after is not None and pieces >= leave_after:
                return text
    raise AssertionError("the stream was cut off")


async def let_in(client: httpx.AsyncClient) -> int:
    """Requests that run, wait or have ended."""
    page = (await client.get("/metrics")).text
    found = re.findall(r"^tessellm_(?:slots_used|queue_waiting|requests_total\S*) (\d+)$", page, re.MULTILINE)
    return sum(map(int, found))


def all_at_once(url: str, leaving: dict[int, int] | None = None) -> list[str | None]:
    async def main() -> list[str | None]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
            return await asyncio.gather(*(stream(client, n, (leaving or {}).get(n)) for n in range(CLIENTS)))

    return asyncio.run(main())


def test_everyone_gets_the_text_that_the_engine_writes_alone(server: Running, expected: list[str]) -> None:
    assert all_at_once(server.url) == expected
    server.wait_until_idle()


def test_clients_that_hang_up_free_their_slots(server: Running, expected: list[str]) -> None:
    before = server.metric('tessellm_requests_total{reason="length"}')
    leaving = {number: 1 + number % 5 for number in range(0, CLIENTS, 3)}
    texts = all_at_once(server.url, leaving)
    assert all(texts[number] == expected[number] for number in range(CLIENTS) if number not in leaving)
    server.wait_until_idle()
    assert server.metric('tessellm_requests_total{reason="cancelled"}') > 0
    assert server.metric('tessellm_requests_total{reason="length"}') > before


def test_too_many_are_told_to_come_back_and_what_was_accepted_is_finished_when_told_to_stop(
    composed: tuple[Any, Path], expected: list[str], tmp_path: Path
) -> None:
    room = 22
    with serving(composed[1], tmp_path / "log.txt", "--slots", "2", "--queue", str(room - 2)) as small:
        texts = all_at_once(small.url)
        accepted = [number for number, text in enumerate(texts) if text is not None]
        assert room <= len(accepted) < CLIENTS
        assert all(texts[number] == expected[number] for number in accepted)
        assert small.metric('tessellm_responses_total{path="/v1/completions",status="429"}') == CLIENTS - len(accepted)
        small.wait_until_idle()

        async def told_to_stop() -> list[str | None]:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
            async with httpx.AsyncClient(base_url=small.url, timeout=120, limits=limits) as client:
                before = await let_in(client)
                running = [asyncio.create_task(stream(client, number)) for number in range(room)]
                while await let_in(client) < before + room:
                    await asyncio.sleep(0.01)
                small.process.send_signal(signal.SIGTERM)
                return await asyncio.gather(*running)

        assert asyncio.run(told_to_stop()) == expected[:room]
        deadline = time.monotonic() + 20
        while small.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert small.process.returncode == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{small.url}/health")
