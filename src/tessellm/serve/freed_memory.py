"""Memory that was freed goes back to the system. glibc keeps what a program frees for its next allocations: after
prompts of many lengths that is some hundred MiB that nobody uses. Knows no requests."""

from __future__ import annotations

import asyncio
import ctypes
import sys
from collections.abc import Callable

EVERY = 10.0  # seconds


async def give_back_regularly(count_work: Callable[[], int], seconds: float = EVERY) -> None:
    """Give freed memory back at intervals, if anything was done since the last time: for ever, beside the server."""
    before = count_work()
    while True:
        await asyncio.sleep(seconds)
        now = count_work()
        if now != before:
            await asyncio.to_thread(give_back)
        before = now


def give_back() -> None:
    """Return free pages of all heaps to the system; nothing where the C library is not glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
