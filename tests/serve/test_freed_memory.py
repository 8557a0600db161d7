"""Memory that the server has freed goes back to the system."""

from __future__ import annotations

import asyncio
import platform
import subprocess
import sys
from contextlib import suppress

import pytest

from tessellm.serve import freed_memory

SMALL, PIECES = 64 << 10, 2000  # bytes: below what glibc maps by itself
PROGRAM = f"""
from tessellm.serve.freed_memory import give_back

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

pieces = [bytearray({SMALL}) for _ in range({PIECES})]
last = pieces.pop()  # keeps the end of the heap, without which all of it would go
full = resident()
del pieces
give_back()
print(full - resident())
assert last is not None
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries give it back, or do not tell")
def test_freed_memory_is_given_back() -> None:
    told = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert int(told.stdout) > 0.9 * SMALL * PIECES


def test_only_after_something_was_done(monkeypatch: pytest.MonkeyPatch) -> None:
    given, done = [], iter([0, 0, 3, 3, 4])
    monkeypatch.setattr(freed_memory, "give_back", lambda: given.append(True))

    async def until_the_counts_end() -> None:
        with suppress(RuntimeError):  # of the coroutine that meets the end of the iterator
            await freed_memory.give_back_regularly(lambda: next(done), seconds=0.001)

    asyncio.run(until_the_counts_end())
    assert len(given) == 2
