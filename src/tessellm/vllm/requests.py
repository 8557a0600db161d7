"""Requests of vLLM's server for a composition: routed by its engine, answered by the member that was chosen.

As ASGI middleware it runs in every API server. Where the server starts, it puts the composition beside the adapters
that vLLM knows by name, and itself between vLLM's endpoints and the engine: a request with the composition's name is
first sent for its route, then with the adapter that was chosen. So all of vLLM's endpoints route. Knows no router.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from ..checkpoint import read_config
from ..errors import nearest, quoted
from ..routing import BASE, Route
from .decision import FOLDER, read_route, route_params
from .versions import LoRARequest

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
DIGITS, MOST_TOLD = 4, 8
PROMPTS = {"messages", "prompt", "input"}  # keys of requests that are answered
decisions: ContextVar[list[Route | None] | None] = ContextVar("decisions", default=None)  # of a request's prompts


class RoutedRequests:
    """The middleware."""

    def __init__(self, app: Any):
        self.app = app
        self.names: list[str] = []  # the composition, then its members

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            self.names = install(scope["app"].state)
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"].startswith("/v1/"):
            body = await read_body(receive)
            asked = as_object(body)
            if asked is not None and not PROMPTS.isdisjoint(asked):
                refusal = self.resolve(asked)
                if refusal is not None:
                    await refuse(send, *refusal)
                    return
                body = json.dumps(asked).encode()
            scope, receive = with_body(scope, body, receive)
            routes: list[Route | None] = []
            decisions.set(routes)
            send = Annotated(send, routes, (asked or {}).get("n")).send
        await self.app(scope, receive, send)

    def resolve(self, asked: dict[str, Any]) -> tuple[int, str] | None:
        """Take our own keys out of a request: who is named there answers. Returns why it is refused, if it is."""
        name, *members = self.names
        model = asked.get("model") or name
        asked["model"] = model
        own = asked.pop("tessellm", None) or {}
        if not isinstance(own, dict) or own.keys() - {"experts"}:
            return 400, "tessellm: expected experts, the name of one member; vLLM's server takes nothing else there"
        experts = own.get("experts")
        if experts is None:
            return None
        if model != name:
            return 400, f"tessellm.experts is for the composition {name!r}; the request is for {quoted(str(model))}"
        named = [experts] if isinstance(experts, str) else list(experts) if isinstance(experts, dict) else []
        if len(named) != 1 or (isinstance(experts, dict) and experts[named[0]] != 1):
            return 400, (
                "tessellm.experts: expected the name of one member; vLLM runs one adapter for each request. Several at "
                "once: leave out --engine vllm, or compose with weights"
            )
        if named[0] not in members:
            return 404, f"there is no expert {quoted(named[0])}; {nearest(named[0], members)}"
        asked["model"] = named[0]
        return None


def install(state: Any) -> list[str]:
    """Let an API server's engine route; return the names of the composition and its members."""
    engine, models = state.engine_client, state.openai_serving_models
    folder = Path(state.vllm_config.additional_config[FOLDER])
    name, members = folder.name, read_config(folder).member_names
    generate, show = engine.generate, models.show_available_models

    async def routed(prompt: Any, sampling_params: Any, request_id: str, **options: Any) -> AsyncIterator[Any]:
        lora = options.get("lora_request")
        if lora is not None and lora.lora_name == name:
            found = decisions.get()
            place = len(found) if found is not None else 0
            if found is not None:
                found.append(None)  # prompts of one request are answered side by side
            kept = {key: options[key] for key in ("priority", "data_parallel_rank", "trace_headers") if key in options}
            route = await ask_route(generate, prompt, request_id, members, **kept)
            if found is not None:
                found[place] = route
            if route.selected != BASE and route.selected not in models.lora_requests:
                raise ValueError(f"expert {route.selected!r} was selected for this prompt, and it was unloaded")
            options["lora_request"] = models.lora_requests.get(route.selected)
        async with aclosing(generate(prompt, sampling_params, request_id, **options)) as outputs:
            async for output in outputs:
                yield output

    async def listed() -> Any:
        cards = await show()
        own = next(card for card in cards.data if card.id == name)
        own.parent = None
        cards.data.remove(own)
        cards.data.insert(0, own)
        return cards

    engine.generate, models.show_available_models = routed, listed
    models.lora_requests[name] = LoRARequest(lora_name=name, lora_int_id=len(members) + 1, lora_path=str(folder))
    return [name, *members]


async def ask_route(
    generate: Callable[..., Any], prompt: Any, request_id: str, members: Sequence[str], **options: Any
) -> Route:
    """The route of a prompt, by the engine's own `generate`."""
    outputs = generate(prompt, route_params(len(members)), f"{request_id}-route", **options)
    (route,) = [read_route(output, members) async for output in outputs]
    return route


class Annotated:
    """Adds to every choice that is sent the route of its prompt."""

    def __init__(self, send: Send, routes: list[Route | None], choices: Any):
        self._send, self._routes = send, routes
        self._each = choices if isinstance(choices, int) and choices > 0 else 1  # choices of a prompt
        self._start: Message | None = None
        self._body = b""
        self._told: set[int] = set()
        self._streams = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            kind = dict(message["headers"]).get(b"content-type", b"").split(b";")[0]
            self._streams = kind == b"text/event-stream"
            if kind == b"application/json":
                self._start = message  # its length will change
                return
        elif self._start is not None:
            await self._send_whole(self._start, message)
            return
        elif self._streams and len(self._told) < self._each * len(self._routes):
            events = message.get("body", b"").split(b"\n\n")
            message = {**message, "body": b"\n\n".join(map(self._event, events))}
        await self._send(message)

    async def _send_whole(self, start: Message, message: Message) -> None:
        self._body += message.get("body", b"")
        if message.get("more_body"):
            return
        answer = as_object(self._body) if self._routes else None
        if answer is not None:
            self._tell(answer)
            self._body = json.dumps(answer).encode()
        headers = [(key, value) for key, value in start["headers"] if key != b"content-length"]
        headers.append((b"content-length", str(len(self._body)).encode()))
        await self._send({**start, "headers": headers})
        await self._send({"type": "http.response.body", "body": self._body})

    def _event(self, event: bytes) -> bytes:
        answer = as_object(event.removeprefix(b"data: "))
        if answer is None:
            return event
        self._tell(answer)
        return b"data: " + json.dumps(answer).encode()

    def _tell(self, answer: dict[str, Any]) -> None:
        for choice in answer.get("choices", []):
            number = choice["index"]
            place = number // self._each
            route = self._routes[place] if place < len(self._routes) else None
            if route is not None and number not in self._told:
                self._told.add(number)
                choice["tessellm"] = {"route": describe(route)}


def describe(route: Route) -> dict[str, Any]:
    """A route as our own server writes it."""
    ranked = sorted(route.prior, key=route.prior.__getitem__, reverse=True)[:MOST_TOLD]
    prior = {name: round(route.prior[name], DIGITS) for name in ranked}
    return {"selected": route.selected, "active": [route.selected], "prior": prior}


def as_object(body: bytes) -> dict[str, Any] | None:
    """The JSON object in a body, if it is one."""
    try:
        found = json.loads(body)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


async def read_body(receive: Receive) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    return body


def with_body(scope: Message, body: bytes, receive: Receive) -> tuple[Message, Receive]:
    """A request with another body; later messages are the client's own."""
    headers = [(key, value) for key, value in scope["headers"] if key != b"content-length"]
    left = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_body() -> Message:
        return left.pop() if left else await receive()

    return {**scope, "headers": [*headers, (b"content-length", str(len(body)).encode())]}, receive_body


async def refuse(send: Send, status: int, message: str) -> None:
    kind = "NotFoundError" if status == 404 else "BadRequestError"
    error = {"message": message, "type": kind, "param": "tessellm.experts", "code": status}
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
