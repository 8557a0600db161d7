"""uvicorn's server with an orderly end: who was let in has some time left, and nobody else holds it up."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import uvicorn

from .limits import Limits
from .protocol import BoundedProtocol, Crowd
from .settings import Settings

BACKLOG = 2048  # connections that wait to be accepted
LAST_SECONDS = 1.0  # for answers that are cut off to end by themselves


class DrainingServer(uvicorn.Server):
    """Serves until it is told to stop, then until the service has no more time for anyone."""

    def __init__(self, app: Any, end_at: Callable[[float], None], settings: Settings, limits: Limits):
        self.end_at, self.settings, self.crowd = end_at, settings, Crowd(limits)
        protocol: Any = partial(BoundedProtocol, crowd=self.crowd)
        super().__init__(
            uvicorn.Config(
                app, http=protocol, ws="none", lifespan="on", log_level="error", access_log=False, server_header=False,
                backlog=limits.accepted_at_once, timeout_graceful_shutdown=settings.last_resort_seconds,
            )
        )  # fmt: skip
        logging.getLogger("uvicorn.error").addFilter(not_cancelled)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept. asyncio shortens the queue of the socket to what it accepts at once: lengthen it again."""
        await super().startup(sockets)
        for each in sockets or ():
            each.listen(BACKLOG)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Say until when there is time; then wait for what was let in, and on a second Ctrl-C for nothing."""
        self.end_at(time.monotonic() + self.settings.drain_seconds)
        self.crowd.stopping = True
        await super().shutdown(sockets)
        if self.force_exit:
            await self._cut_off()

    async def _cut_off(self) -> None:
        for connection in self.server_state.connections:
            connection.transport.abort()
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=LAST_SECONDS)


def not_cancelled(record: logging.LogRecord) -> bool:
    """Whether a record is worth a line: uvicorn logs whatever is cut off at the end, as an exception or as its text."""
    cancelled = record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError)
    return not cancelled and "CancelledError" not in record.getMessage()
