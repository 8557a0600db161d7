"""Turns at work that must not run twice at once: the shortest that waits comes next, and who leaves is forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import TypeVar

from anyio import to_thread

Result = TypeVar("Result")


class Turns:
    """One thread at a time; a short text waits for at most the one that is under way."""

    def __init__(self) -> None:
        self._busy = False
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []  # a heap: size, number
        self._numbers = count()

    async def run(self, size: int, work: Callable[[], Result]) -> Result:
        """Do it in a thread when its turn comes."""
        await self._turn(size)
        try:
            return await to_thread.run_sync(work)
        finally:
            self._next()

    async def _turn(self, size: int) -> None:
        if not self._busy:
            self._busy = True
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heappush(self._waiting, (size, next(self._numbers), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # its turn had just come
                self._next()
            raise

    def _next(self) -> None:
        self._busy = False
        while self._waiting and not self._busy:
            turn = heappop(self._waiting)[2]
            if not turn.done():  # else nobody waits for it any more
                self._busy = True
                turn.set_result(None)
