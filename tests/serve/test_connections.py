"""Clients that send nothing, half of it, or do not read; more connections than descriptors; the end with them there."""

from __future__ import annotations

import json
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tessellm.serve import protocol
from tessellm.serve.draining import DrainingServer
from tessellm.serve.limits import Limits
from tessellm.serve.settings import Settings

from servers import PATIENCE, serving

pytestmark = pytest.mark.xdist_group("serve")  # one worker, so that servers are started once
HALF_HEADER = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Half: "
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HALF_BODY = POST + b"Content-Length: 99\r\n\r\n{"
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
SHORT = Limits(header_seconds=0.5, body_seconds=0.5, idle_seconds=0.5, stalled_seconds=0.5, parting_seconds=0.5)


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """An application that reads the body, then sends a byte; at /large more than any buffer holds, at /slow late."""
    if scope["type"] == "lifespan":
        while True:
            message = await receive()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return
    while (message := await receive()).get("more_body"):
        pass
    if message["type"] == "http.disconnect":
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(2000 if scope["path"] == "/large" else 1):
        await send({"type": "http.response.body", "body": b"x" * (1 << 16), "more_body": True})
    await send({"type": "http.response.body", "body": b"x"})


@contextmanager
def bounded(limits: Limits) -> Iterator[Callable[..., socket.socket]]:
    """A server of that application in a thread; what connects to it and sends something."""
    with ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        server = DrainingServer(echo, lambda moment: None, Settings(drain_seconds=1), limits)
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        address = listening.getsockname()

        def connect(sent: bytes = b"") -> socket.socket:
            client = stack.enter_context(socket.create_connection(address, PATIENCE))
            client.sendall(sent)
            return client

        try:
            yield connect
        finally:
            server.should_exit = True
            thread.join(PATIENCE)


def rest(client: socket.socket) -> bytes:
    """All that comes until the server ends the connection."""
    received = b""
    try:
        while part := client.recv(1 << 16):
            received += part
    except ConnectionError:
        pass
    return received


def is_open(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return bool(client.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


def test_who_takes_too_long_to_send_is_told_and_dropped(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR), bounded(SHORT) as connect:
        begun = time.monotonic()
        silent, header, body, idle = connect(), connect(HALF_HEADER), connect(HALF_BODY), connect(GET)
        assert rest(silent) == b""
        for client, part in ((header, "header"), (body, "body")):
            told = rest(client)
            assert told.startswith(b"HTTP/1.1 408")
            assert json.loads(told.partition(b"\r\n\r\n")[2])["error"]["message"].startswith(f"the {part}")
        assert rest(idle).startswith(b"HTTP/1.1 200")
        assert 0.4 < time.monotonic() - begun < PATIENCE / 2
    assert not caplog.records


@pytest.mark.parametrize("swapped", [False, True])
def test_a_body_with_a_length_and_in_chunks_is_refused(swapped: bool) -> None:
    """A proxy that goes by the other header would see another request behind it."""
    length, chunked = b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n"
    header = (chunked + length) if swapped else (length + chunked)
    with bounded(SHORT) as connect:
        told = rest(connect(POST + header + b"\r\n0\r\n\r\n" + GET))
        assert told.startswith(b"HTTP/1.1 400")
        assert b"either Content-Length or Transfer-Encoding" in told
        assert told.count(b"HTTP/1.1 ") == 1  # the request behind it was not read
        assert rest(connect(POST + chunked + b"\r\n0\r\n\r\n")).startswith(b"HTTP/1.1 200")


def test_who_does_not_read_is_dropped() -> None:
    with bounded(SHORT) as connect:
        client = connect(GET.replace(b"/health", b"/large"))
        time.sleep(2.5)  # without reading
        assert len(rest(client)) < 2000 * (1 << 16)


def test_whoever_has_waited_longest_makes_room(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "TOLD_EVERY", 0.3)
    with bounded(Limits(connections=5)) as connect:
        answering = connect(GET.replace(b"/health", b"/large"))
        assert answering.recv(1)
        clients = []
        for sent in (b"", HALF_HEADER, HALF_BODY, b"", b"", b"", b""):
            clients.append(connect(sent))
            time.sleep(0.1)  # a request that comes in parts has waited since the last of them
        until = time.monotonic() + PATIENCE
        while any(is_open(client) for client in clients[:3]) and time.monotonic() < until:
            time.sleep(0.1)
        time.sleep(0.5)  # were any more to be dropped, they would be by now
        assert [is_open(client) for client in clients] == [False] * 3 + [True] * 4
        clients[3].setblocking(True)
        clients[3].sendall(GET)
        assert clients[3].recv(15) == b"HTTP/1.1 200 OK"
        answering.settimeout(PATIENCE)
        received = 0
        while received < 1000 * (1 << 16):  # nothing was cut off
            received += len(answering.recv(1 << 20))
    told = [record.getMessage() for record in caplog.records if record.name == "tessellm.serve"]
    assert told == ["connections dropped: 3 since there were too many (at most 5 may be open)"]


def test_a_body_comes_in_a_bounded_number_of_pieces(caplog: pytest.LogCaptureFixture) -> None:
    head = POST + b"Transfer-Encoding: chunked\r\n\r\n"
    with caplog.at_level(logging.ERROR), bounded(Limits(body_parts=100)) as connect:
        few = connect(head + b"1\r\na\r\n" * 90 + b"0\r\n\r\n")
        assert few.recv(15) == b"HTTP/1.1 200 OK"
        many = connect(head + b"1\r\na\r\n" * 500)
        assert rest(many).startswith(b"HTTP/1.1 400")
        for sent in (b"nonsense\r\n\r\n", GET + b"nonsense\r\n\r\n", b"GET /" + b"x" * 100_000):
            assert b"HTTP/1.1 400" in rest(connect(sent))
    assert not caplog.records


def test_more_connections_than_descriptors_do_not_stop_the_server(composed: tuple[Any, Path], tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    with serving(composed[1], log, "--slots", "1", descriptors=256) as server, ExitStack() as stack:
        port = int(server.url.rpartition(":")[2])
        for number in range(900):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE))
            client.sendall((b"", HALF_HEADER, HALF_BODY)[number % 3])
        assert httpx.get(f"{server.url}/health", timeout=PATIENCE).status_code == 200
        deadline = time.monotonic() + PATIENCE
        while "connections dropped" not in log.read_text() and time.monotonic() < deadline:
            time.sleep(0.1)
    written = log.read_text()
    assert "since there were too many (at most 128 may be open)" in written
    assert "Traceback" not in written
    assert len(written.splitlines()) < 10


def streams(server: Any, stack: ExitStack, count: int) -> list[socket.socket]:
    """Clients that ask for long streams and do not read them."""
    asked = {"model": "tiny", "prompt": "a", "max_tokens": 120, "stream": True, "tessellm": {"trace": True}}
    body = json.dumps(asked).encode()
    port = int(server.url.rpartition(":")[2])
    clients = []
    for _ in range(count):
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        stack.enter_context(client)
        client.connect(("127.0.0.1", port))
        client.sendall(POST + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        clients.append(client)
    return clients


def wait_until_let_in(server: Any, count: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while server.metric("tessellm_slots_used") + server.metric("tessellm_queue_waiting") < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_who_sends_half_or_does_not_read_does_not_hold_the_end(composed: tuple[Any, Path], tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    with serving(composed[1], log, "--slots", "2") as server, ExitStack() as stack:
        port = int(server.url.rpartition(":")[2])
        half = [stack.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE)) for _ in range(20)]
        for number, client in enumerate(half):
            client.sendall((HALF_HEADER, HALF_BODY)[number % 2])
        streams(server, stack, 4)
        wait_until_let_in(server, 1)
        server.process.send_signal(signal.SIGTERM)
        begun = time.monotonic()
        assert server.process.wait(PATIENCE) == 0
        assert time.monotonic() - begun < 40  # it would have been drain and ten seconds: 70
        assert rest(half[1]).startswith(b"HTTP/1.1 503")
    assert "Traceback" not in log.read_text()


def test_a_second_ctrl_c_ends_it_in_silence(composed: tuple[Any, Path], tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    with serving(composed[1], log, "--slots", "2") as server, ExitStack() as stack:
        streams(server, stack, 60)
        wait_until_let_in(server, 20)
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        server.process.send_signal(signal.SIGINT)
        begun = time.monotonic()
        server.process.wait(PATIENCE)
        assert time.monotonic() - begun < 20
    assert "Traceback" not in log.read_text()
    assert "Error" not in log.read_text()
