"""The application: paths, what is behind them, and how they are described."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from .. import __version__
from .answers import ChatCompletion, Completion, Health, Model, Models
from .changes import Changes, LoadAdapter, UnloadAdapter
from .connections import EventStream, unless_gone
from .examples import ExampleEffect, ExampleRequest, Examples
from .freed_memory import give_back_regularly
from .guard import PAGE, Guard
from .malformed import malformed
from .refusals import ErrorResponse, Refusal
from .replies import as_body
from .schema import ChatRequest, CompletionRequest
from .service import Running, Service

ROUTE = "x-tessellm-route"  # the header that names who answers
UNREADABLE = (
    "the request is malformed: the body cannot be read. Expected JSON in UTF-8, neither compressed nor deeply nested"
)
REFUSED: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse, "description": meaning}
    for status, meaning in {
        400: "The request cannot be fulfilled.",
        401: "The key is missing or wrong.",
        404: "There is no such model.",
        413: "The request is too large.",
        421: "The request is for another host.",
        429: "The queue is full; Retry-After says when to come back.",
        500: "The request failed.",
        503: "The server does not take requests.",
        504: "The request took too long.",
    }.items()
}
EVENT = {  # of each event: a piece of the answer as JSON, an error, or [DONE]
    "type": "object",
    "properties": {"event": {"const": "message"}, "data": {"type": "string"}},
    "required": ["data"],
}
STREAMED: dict[int | str, dict[str, Any]] = {
    **REFUSED,
    200: {"content": {"text/event-stream": {"schema": EVENT}}, "description": "The answer, whole or streamed."},
}


def make_app(service: Service) -> Guard:
    """The application, guarded, around a service that starts and stops with it."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.start(asyncio.get_running_loop())
        tidying = asyncio.create_task(give_back_regularly(service.metrics.responses.total))
        yield
        tidying.cancel()
        service.stop()

    api = FastAPI(
        title="tessellm", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False, lifespan=lifespan
    )
    _add_models(api, service)
    _add_generation(api, service)
    _add_state(api, service)
    changes = Changes(service)
    _add_examples(api, Examples(service, changes.lock))
    if service.settings.updates:
        _add_changes(api, changes)
    _add_page(api)
    _add_refusals(api)
    _describe(api, [] if service.settings.updates else service.targets.names)
    paths = {getattr(route, "path", "") for route in api.routes}

    def count(path: str, status: int) -> None:
        service.metrics.responses[path if path in paths else "other", status] += 1

    return Guard(api, service.settings, count)


def _add_models(api: FastAPI, service: Service) -> None:
    @api.get("/v1/models", responses=REFUSED)
    async def models() -> Models:
        return service.models()

    @api.get("/v1/models/{model}", responses=REFUSED)
    async def model(model: str) -> Model:
        return service.about(model)


def _add_generation(api: FastAPI, service: Service) -> None:
    async def answer(request: Request, starting: Coroutine[Any, Any, Running]) -> Response:
        running = await unless_gone(request.receive, starting)
        if running.asked.stream:
            return EventStream(service.streamed(running), lambda: routed(running))
        whole = await unless_gone(request.receive, service.whole(running))
        return Response(as_body(whole), media_type="application/json", headers=routed(running))

    def routed(running: Running) -> dict[str, str]:
        return {ROUTE: running.answered_by} if running.answered_by else {}

    @api.post("/v1/completions", responses=STREAMED, response_model=Completion)
    async def completions(asked: CompletionRequest, request: Request) -> Response:
        return await answer(request, service.complete(asked))

    @api.post("/v1/chat/completions", responses=STREAMED, response_model=ChatCompletion)
    async def chat(asked: ChatRequest, request: Request) -> Response:
        return await answer(request, service.chat(asked))


def _add_changes(api: FastAPI, changes: Changes) -> None:
    """vLLM's endpoints, with its answers in plain text."""

    @api.post("/v1/load_lora_adapter", responses=REFUSED, response_class=PlainTextResponse)
    async def load(asked: LoadAdapter) -> str:
        return await asyncio.shield(changes.load(asked))

    @api.post("/v1/unload_lora_adapter", responses=REFUSED, response_class=PlainTextResponse)
    async def unload(asked: UnloadAdapter) -> str:
        return await asyncio.shield(changes.unload(asked))


def _add_examples(api: FastAPI, examples: Examples) -> None:
    unchangeable: dict[int | str, dict[str, Any]] = {
        403: {"model": ErrorResponse, "description": "Clients may not change this."}
    }

    @api.post("/v1/examples", responses={**REFUSED, **unchangeable})
    async def example(asked: ExampleRequest) -> ExampleEffect:
        """Say what an example of a member would change; with `save`, add it."""
        return await asyncio.shield(examples.add(asked))


def _add_state(api: FastAPI, service: Service) -> None:
    @api.get("/health", responses={503: {"model": Health}})
    async def health() -> Health:
        """Whether the engine works."""
        failure = service.scheduler.failure
        return _state(Health(status="failed" if failure else "ok", detail=failure))

    @api.get("/ready", responses={503: {"model": Health}})
    @api.get("/health/ready", responses={503: {"model": Health}})
    async def ready() -> Health:
        """Whether a request would be let in now. Nothing is compiled for the first ones: that was done before."""
        scheduler = service.scheduler
        full = scheduler.failure is not None or scheduler.full
        return _state(Health(status="not ready" if full else "ready", detail=scheduler.failure))

    @api.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        engine, late = service.engine, service.runner.prepared.late
        drafts = (engine.speculator.drafted, engine.speculator.accepted) if engine.speculator else (0, 0)
        running = sum(scheduler.running for scheduler in service.schedulers)
        waiting = sum(scheduler.waiting for scheduler in service.schedulers)
        text = service.metrics.text(len(engine.in_slot), running, waiting, late, drafts)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


def _state(health: Health) -> Any:
    return JSONResponse(health.model_dump(), 200 if health.status in ("ok", "ready") else 503)


def _add_page(api: FastAPI) -> None:
    for path, (name, kind) in PAGE.items():
        content = files(__package__).joinpath(name).read_bytes()
        api.add_api_route(path, _constant(content, kind), include_in_schema=False)


def _constant(content: bytes, kind: str) -> Any:
    async def send() -> Response:
        return Response(content, media_type=f"{kind}; charset=utf-8")

    return send


def _add_refusals(api: FastAPI) -> None:
    @api.exception_handler(Refusal)
    async def refused(request: Request, error: Refusal) -> Response:
        return JSONResponse(error.body, error.status, headers=error.headers)

    @api.exception_handler(RequestValidationError)
    async def misshapen(request: Request, error: RequestValidationError) -> Response:
        return await refused(request, malformed(error.errors()[0], error.body))

    @api.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        headers, detail = dict(error.headers or {}), str(error.detail)
        told = UNREADABLE if error.status_code == 400 else detail
        return await refused(request, Refusal(error.status_code, told, headers=headers))

    @api.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)  # nobody reads it

    @api.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return await refused(request, Refusal(500, "the server failed; its log says why", kind="server_error"))


def _describe(api: FastAPI, names: list[str]) -> None:
    """Name the models, if any are given. Wrong requests are answered with 400 and OpenAI's shape, so nothing else is
    promised."""
    described = api.openapi()
    for path in described["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
    schemas = described["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    for name in ("CompletionRequest", "ChatRequest") if names else ():
        schemas[name]["properties"]["model"]["enum"] = names
