"""A server without room for all, and told to stop while it is busy. Nothing can be asked of `locked` after this."""

from __future__ import annotations

import asyncio
import signal
import time

import httpx
import pytest

from clients import CLIENTS, all_at_once, let_in, stream, with_client
from servers import PATIENCE, Running

pytestmark = pytest.mark.xdist_group("serve")  # one worker, so that servers are started once
ROOM = 22


def test_too_many_are_told_to_come_back(locked: Running, expected: list[str]) -> None:
    texts = all_at_once(locked)
    accepted = [number for number, text in enumerate(texts) if text is not None]
    assert ROOM <= len(accepted) < CLIENTS
    assert all(texts[number] == expected[number] for number in accepted)
    assert locked.metric('tessellm_responses_total{path="/v1/completions",status="429"}') == CLIENTS - len(accepted)
    locked.wait_until_idle()


def test_what_was_accepted_is_finished_when_it_is_told_to_stop(locked: Running, expected: list[str]) -> None:
    async def told_to_stop(client: httpx.AsyncClient) -> list[str | None]:
        before = await let_in(client)
        running = [asyncio.create_task(stream(client, number)) for number in range(ROOM)]
        while await let_in(client) < before + ROOM:
            await asyncio.sleep(0.01)
        locked.process.send_signal(signal.SIGTERM)
        return await asyncio.gather(*running)

    assert with_client(locked, told_to_stop) == expected[:ROOM]
    deadline = time.monotonic() + PATIENCE
    while locked.process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert locked.process.returncode == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{locked.url}/health")
