"""Answers to clients that may go away: what they asked for is dropped as soon as they are gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response

Result = TypeVar("Result")


async def unless_gone(receive: Any, work: Coroutine[Any, Any, Result]) -> Result:
    """Do the work; if the client leaves before it is done, stop it."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect()
        return working.result()
    finally:
        for task in (working, leaving):
            await _cancelled(task)


async def _gone(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancelled(task: asyncio.Future[Any]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError, Exception):
        await task


class EventStream(Response):
    """Server-sent events from a generator, which is closed when the client is gone. `told`: headers that are known once
    there is a first event."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], told: Callable[[], Mapping[str, str]]):
        super().__init__()
        self.events, self.told = events, told
        self.raw_headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        with suppress(ClientDisconnect):
            await unless_gone(receive, self._send_all(send))

    async def _send_all(self, send: Any) -> None:
        async with aclosing(self.events) as events:
            begun = False
            async for event in events:
                if not begun:
                    self.headers.update(self.told())
                    await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                    begun = True
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
