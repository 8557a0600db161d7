"""Many clients at once, and clients that hang up, as politely as they may or not."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from clients import CLIENTS, all_at_once, prompt, with_client
from servers import PATIENCE, Running, serving

pytestmark = pytest.mark.xdist_group("serve")  # one worker, so that servers are started once


def test_everyone_gets_the_text_that_the_engine_writes_alone(server: Running, expected: list[str]) -> None:
    assert all_at_once(server) == expected
    server.wait_until_idle()
    assert "tessellm_late_preparations_total 0\n" in server.get("/metrics").text


def test_clients_that_hang_up_free_their_slots(server: Running, expected: list[str]) -> None:
    before = server.metric('tessellm_requests_total{reason="length"}')
    leaving = {number: 1 + number % 5 for number in range(0, CLIENTS, 3)}
    texts = all_at_once(server, leaving)
    assert all(texts[number] == expected[number] for number in range(CLIENTS) if number not in leaving)
    server.wait_until_idle()
    assert server.metric('tessellm_requests_total{reason="cancelled"}') > 0
    assert server.metric('tessellm_requests_total{reason="length"}') > before


def test_clients_that_are_cut_off_free_their_slots(server: Running) -> None:
    """A reset connection, as of a machine that went down: nothing is sent to say so."""
    before = server.metric('tessellm_requests_total{reason="cancelled"}')
    body = json.dumps({"model": "tiny", "prompt": prompt(1), "max_tokens": 100, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    for _ in range(6):
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), PATIENCE) as client:
            client.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
            assert client.recv(100).startswith(b"HTTP/1.1 200")
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    server.wait_until_idle()
    assert server.metric('tessellm_requests_total{reason="cancelled"}') == before + 6


def resident_bytes(server: Running) -> int:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS"))


def test_prompts_of_a_megabyte_hold_nobody_up(server: Running) -> None:
    large: dict[str, Any] = {"model": "tiny", "prompt": "ab " * 300_000, "max_tokens": 1}
    small = {"model": "tiny", "prompt": "ab", "max_tokens": 1}
    before = resident_bytes(server)

    async def work(client: httpx.AsyncClient) -> float:
        flood = [asyncio.create_task(client.post("/v1/completions", json=large)) for _ in range(40)]
        await asyncio.sleep(0.2)
        begun = time.monotonic()
        assert (await client.post("/v1/completions", json=small)).status_code == 200
        took = time.monotonic() - begun
        assert {answer.status_code for answer in await asyncio.gather(*flood)} == {400}
        return took

    assert with_client(server, work) < 20  # seconds, of which the machine takes most: it was 55
    assert resident_bytes(server) - before < 150 << 20


def test_a_million_pieces_are_not_read(server: Running) -> None:
    port = int(server.url.rpartition(":")[2])
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", port), PATIENCE) as client:
        client.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 20_000)
        assert client.recv(100).startswith(b"HTTP/1.1 400")
    assert server.get("/health").status_code == 200


def test_at_twice_the_throughput_who_is_let_in_is_served_in_order_and_the_rest_is_told_when_to_return(
    composed: tuple[Any, Path], tmp_path: Path
) -> None:
    """Two slots and six places; clients come twice as fast as two slots can serve them, for a while."""
    asked = {"model": "tiny", "prompt": "ab", "max_tokens": 100, "temperature": 0}
    room = ("--slots", "2", "--queue", "6")
    with serving(composed[1], tmp_path / "log.txt", *room) as server:
        begun = time.monotonic()
        for _ in range(3):
            assert server.post("/v1/completions", json=asked).status_code == 200
        alone = (time.monotonic() - begun) / 3
        ended: list[int] = []

        async def one(client: httpx.AsyncClient, number: int) -> httpx.Response:
            await asyncio.sleep(number * alone / 4)  # two slots serve a request per half of `alone` at best
            answer = await client.post("/v1/completions", json=asked)
            ended.extend([number] if answer.status_code == 200 else [])
            return answer

        async def work(client: httpx.AsyncClient) -> list[httpx.Response]:
            return list(await asyncio.gather(*(one(client, number) for number in range(48))))

        answers = with_client(server, work)
        server.wait_until_idle()
    refused = [answer for answer in answers if answer.status_code != 200]
    assert {answer.status_code for answer in refused} <= {429}  # none, if the machine had less to do meanwhile
    assert all(1 <= int(answer.headers["retry-after"]) <= 60 for answer in refused)
    assert len(ended) >= 48 // 4
    place = {number: at for at, number in enumerate(sorted(ended))}
    assert all(abs(place[number] - at) <= 3 for at, number in enumerate(ended))  # two slots may end at one time
