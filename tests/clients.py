"""Clients of a test's server: many at once, each with a streamed text, some of which hang up in the middle."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from servers import PATIENCE, Running

CLIENTS, NEW = 48, 16


def prompt(number: int) -> str:
    return f"{number}+{number * 7 % 31}="


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


def with_client(server: Running, work: Callable[[httpx.AsyncClient], Awaitable[Any]]) -> Any:
    """Do it with a client that may have as many connections as it likes, and keeps none."""

    async def main() -> Any:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        options: Any = {"base_url": server.url, "headers": server.http.headers, "timeout": PATIENCE, "limits": limits}
        async with httpx.AsyncClient(**options) as client:
            return await work(client)

    return asyncio.run(main())


def all_at_once(server: Running, leaving: dict[int, int] | None = None) -> list[str | None]:
    """What each of many clients gets; those that leave do so after so many pieces."""

    async def work(client: httpx.AsyncClient) -> list[str | None]:
        return await asyncio.gather(*(stream(client, n, (leaving or {}).get(n)) for n in range(CLIENTS)))

    found: list[str | None] = with_client(server, work)
    return found
