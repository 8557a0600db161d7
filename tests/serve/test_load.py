"""Many clients at once, and clients that hang up, as politely as they may or not."""

from __future__ import annotations

import json
import socket
import struct

import pytest

from clients import CLIENTS, all_at_once, prompt
from servers import PATIENCE, Running

pytestmark = pytest.mark.xdist_group("serve")  # one worker, so that servers are started once


def test_everyone_gets_the_text_that_the_engine_writes_alone(server: Running, expected: list[str]) -> None:
    assert all_at_once(server) == expected
    server.wait_until_idle()


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
