"""uvicorn's HTTP/1.1 connection with bounds: time per phase, connections in all, pieces per body.

A connection waits for its client (idle, or in the middle of a header or a body), answers, or ends. Whoever takes too
long is dropped, and where there are too many, whoever has waited longest. Knows nothing of what is asked.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from .limits import Limits
from .refusals import Refusal, bad, slow_request, unavailable

HEADER_BYTES = 1 << 16
TOLD_EVERY = 5.0  # seconds: one line for all connections that were dropped since the last
WAITING = frozenset({"header", "body", "idle"})  # phases in which the client has to send something

log = logging.getLogger("tessellm.serve")


class Crowd:
    """All connections of a server: how many there may be, which wait for their clients, how many were dropped."""

    def __init__(self, limits: Limits):
        self.limits, self.stopping = limits, False
        self.waiting: dict[BoundedProtocol, None] = {}  # the one that has waited longest comes first
        self._dropped: Counter[str] = Counter()

    def seconds(self, phase: str) -> float | None:
        """How long a connection may stay in a phase; None where something else limits it."""
        limits = self.limits
        if phase == "closing" or (phase == "stalled" and self.stopping):
            return limits.parting_seconds
        known = {"header": limits.header_seconds, "body": limits.body_seconds, "stalled": limits.stalled_seconds}
        return known.get(phase)

    def make_room(self, new: BoundedProtocol) -> None:
        """Drop the connection that has waited longest for its client; the new one where none waits."""
        if len(new.connections) > self.limits.connections:
            next(iter(self.waiting), new).drop("there were too many")

    def note(self, why: str) -> None:
        if not self._dropped:
            asyncio.get_running_loop().call_later(TOLD_EVERY, self._tell)
        self._dropped[why] += 1

    def _tell(self) -> None:
        counts = ", ".join(f"{count} since {why}" for why, count in sorted(self._dropped.items()))
        log.warning("connections dropped: %s (at most %d may be open)", counts, self.limits.connections)
        self._dropped.clear()


class PartedConnection(h11.Connection):
    """h11's connection, with a bound on the pieces of a body, and one way to say where it ends."""

    def __init__(self, most_parts: int):
        super().__init__(h11.SERVER, HEADER_BYTES)
        self._most, self._parts = most_parts, 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._parts = 0
            if {b"content-length", b"transfer-encoding"} <= {name for name, _ in event.headers}:
                raise h11.RemoteProtocolError(
                    "a body has a length or comes in chunks, not both"
                )  # or two servers read two requests
        elif isinstance(event, h11.Data):
            self._parts += 1
            if self._parts > self._most:
                raise h11.RemoteProtocolError(f"a body may come in {self._most} pieces")
        return event


class BoundedProtocol(H11Protocol):
    """One connection: its phase, and a timer for it."""

    def __init__(self, *args: Any, crowd: Crowd, **options: Any):
        super().__init__(*args, **options)
        self.crowd, self.phase = crowd, ""
        self.timeout_keep_alive = crowd.limits.idle_seconds  # type: ignore[assignment]  # uvicorn's timer takes any number
        self.conn = PartedConnection(crowd.limits.body_parts)
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.crowd.make_room(self)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._watch()

    def timeout_keep_alive_handler(self) -> None:
        self.transport.close()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._enter("lost")

    def shutdown(self) -> None:
        """End what waits for its client; let the answer that is being written be the last."""
        self._watch()
        if self.phase == "body":
            self.refuse(unavailable("the server was told to stop"))
        elif self.phase in WAITING:
            self.transport.close()
        elif self.cycle is not None:
            self.cycle.keep_alive = False
        self._enter("")
        self._watch()

    def send_400_response(self, msg: str) -> None:
        self.crowd.note("what came was not HTTP")
        parts = self.crowd.limits.body_parts
        self.refuse(
            bad(
                f"expected HTTP/1.1, a header of at most {HEADER_BYTES} bytes, and a body in at most {parts} pieces, "
                "with either Content-Length or Transfer-Encoding"
            )
        )

    def _watch(self) -> None:
        """After anything that may have changed the phase."""
        phase = self._current_phase()
        if phase != self.phase:
            self._enter(phase)

    def _current_phase(self) -> str:
        if self.transport.is_closing():
            return "closing"
        if self.flow.write_paused:
            return "stalled"
        if self.conn.their_state is h11.SEND_BODY:
            return "body"
        if self.cycle is not None and not self.cycle.response_complete:
            return "answering"
        return "idle" if self.timeout_keep_alive_task is not None else "header"

    def _enter(self, phase: str) -> None:
        self.phase = phase
        if self._timer is not None:
            self._timer.cancel()
        seconds = self.crowd.seconds(phase)
        self._timer = None if seconds is None else self.loop.call_later(seconds, self._expire)
        self.crowd.waiting.pop(self, None)
        if phase in WAITING:
            self.crowd.waiting[self] = None

    def _expire(self) -> None:
        if self.phase == "header" and not self.conn.trailing_data[0]:
            self.transport.close()  # it never asked for anything: a browser may have connected ahead of need
            self.crowd.note("nothing was sent")
        elif self.phase in ("header", "body"):
            self.refuse(slow_request(self.phase, self.crowd.seconds(self.phase) or 0.0))
            self.crowd.note(f"the {self.phase} was not sent in time")
        else:
            self.drop("the answer was not read")
            return
        self._watch()

    def drop(self, why: str) -> None:
        """End it now, whatever was not read."""
        self.transport.abort()
        self.crowd.note(why)
        self._watch()

    def refuse(self, refusal: Refusal) -> None:
        """Answer in the application's place, if nothing was answered yet, and end the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE) and not self.transport.is_closing():
            body = json.dumps(refusal.body).encode()
            headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
            answer = h11.Response(status_code=refusal.status, headers=[*(headers | refusal.headers).items()])
            for event in (answer, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()
