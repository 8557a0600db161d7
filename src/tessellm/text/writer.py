"""Writer: the loop that drives an engine, for `generate`, `evaluate` and the server. It takes requests in, steps, ends
them at stop texts, and tells what came. Knows token ids; what text they are only a StopFinder knows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..engine.engine import Engine
from ..engine.requests import Request
from .options import TextOptions
from .stops import StopFinder, stop_finder
from .structured import Structure

Ordered = tuple[Request, StopFinder | None]


def order(
    engine: Engine,
    tokenizer: Any,
    ids: Sequence[int],
    options: TextOptions,
    number: int,
    form: Structure | None = None,
) -> Ordered:
    """Make a request for the text with that number, checked by the engine, and its stop finder."""
    own = None if form is None else form.another()
    request = engine.limits.check(Request(list(ids), options.sampling(number), form=own))
    return request, stop_finder(tokenizer, options.stop)


class Writer:
    """Requests on one engine, none with a token behind a stop text."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self._stops: dict[Request, StopFinder] = {}

    def enter(self, request: Request, stops: StopFinder | None = None) -> None:
        """Put a request that the engine has checked into the queue."""
        self.engine.waiting.append(request)
        if stops is not None:
            self._stops[request] = stops

    def step(self) -> list[Request]:
        """Step the engine once; return the requests to which tokens came or that ended."""
        arrived = self.engine.step()
        for request in arrived:
            if request in self._stops:
                self._search(request)
        return arrived

    def _search(self, request: Request) -> None:
        """Cut a request at its first stop text; also one that is done, since drafts bring its last tokens together."""
        kept = self._stops[request].kept(request.tokens) if request.finish_reason != "error" else None
        if kept is not None:
            self.cancel(request, "stop")
            for column in (request.tokens, request.logprobs, request.seen):
                del column[kept:]
        elif request.done:
            del self._stops[request]

    def cancel(self, request: Request, reason: str = "cancelled") -> None:
        """End a request for that reason; its slot is free before the next step."""
        self.engine.cancel(request)
        request.finish(reason)
        self._stops.pop(request, None)

    def write(self, ordered: Sequence[Ordered]) -> Iterator[tuple[int, Request]]:
        """Run requests to their ends: each with its number, whenever tokens came to it or it ended. A caller that
        leaves before the end leaves nothing running."""
        running = {request: number for number, (request, _) in enumerate(ordered)}
        for request, stops in ordered:
            self.enter(request, stops)
        try:
            while running:
                for request in self.step():
                    if request in running:
                        yield running.pop(request) if request.done else running[request], request
        finally:
            for request in running:
                self.cancel(request)
