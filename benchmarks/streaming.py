"""A client that times a streamed answer: one connection per request, as a user's. HTTP and server-sent events, no more
than OpenAI's API over a server of this machine needs; knows nothing of models."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True)
class TimedAnswer:
    """When a request was sent, and when each piece of its answer came; seconds of one clock."""

    status: int
    sent: float
    came: list[float] = field(default_factory=list)
    retry_after: int | None = None  # seconds, where it was refused
    error: str | None = None

    @property
    def first(self) -> float:
        """Seconds to the first piece."""
        return self.came[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        """Seconds between pieces."""
        return [after - before for before, after in pairwise(self.came)]


async def ask(url: str, body: Mapping[str, Any]) -> TimedAnswer:
    """Send a completion request and read its stream to the end."""
    where, text = urlsplit(url), json.dumps({**body, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {where.netloc}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
    sent = time.perf_counter()
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    try:
        writer.write(head.encode() + text)
        return await _read(reader, sent)
    finally:
        writer.close()


async def _read(reader: asyncio.StreamReader, sent: float) -> TimedAnswer:
    status = int((await reader.readline()).split()[1])
    headers = {}
    while line := (await reader.readline()).strip():
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.lower()] = value.strip()
    if status != 200:
        wait = headers.get("retry-after")
        return TimedAnswer(status, sent, retry_after=int(wait) if wait else None)
    came, error = [], None
    async for line in reader:  # sizes of chunks and empty lines lie between the events
        if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
            event = json.loads(line.removeprefix(b"data: "))
            error = event["error"]["message"] if "error" in event else error
            if any(choice.get("text") for choice in event.get("choices", ())):
                came.append(time.perf_counter())
    return TimedAnswer(status, sent, came, error=error)
