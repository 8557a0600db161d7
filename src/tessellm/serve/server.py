"""A running server: a socket, uvicorn on it, and an orderly end. What `tessellm serve` starts."""

from __future__ import annotations

import gc
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from ..errors import EngineError, require
from .settings import Settings

if TYPE_CHECKING:
    from .scheduler import Scheduler

BACKLOG = 2048  # connections that wait to be accepted
KEPT_SECONDS = 75  # of an idle connection: more than clients wait, so that none is closed as it is used again


def serve(load: Callable[[], Any], name: str, settings: Settings, tell: Callable[[str], None]) -> None:
    """Listen, load, serve until told to stop; then finish what was accepted. `load` makes the composition."""
    uvicorn, _ = require("uvicorn", "serve"), require("fastapi", "serve")
    with bound(settings) as listening:
        from .app import make_app
        from .service import Service

        logging.basicConfig(format="%(asctime)s %(name)s %(message)s", level=logging.WARNING)
        logging.getLogger("tessellm.serve").setLevel(logging.INFO)
        service = Service(load(), name, settings)
        app = make_app(service)
        gc.collect()
        gc.freeze()  # what was loaded stays: looking through it for garbage would hold everyone up for half a second
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, server_header=False, lifespan="on",
            timeout_graceful_shutdown=settings.last_resort_seconds, timeout_keep_alive=KEPT_SECONDS,
            h11_max_incomplete_event_size=1 << 16, ws="none",
        )  # fmt: skip
        server = uvicorn.Server(config)
        server.shutdown = draining(server.shutdown, service.scheduler, settings)
        with told_if_taken(settings):
            listening.listen(BACKLOG)
        signal.signal(signal.SIGTERM, lambda *_: setattr(server, "should_exit", True))  # uvicorn's own raises it again
        tell(address(listening, settings))
        with suppress(KeyboardInterrupt):
            server.run(sockets=[listening])


def draining(shut_down: Any, scheduler: Scheduler, settings: Settings) -> Any:
    """Before the server waits for what it accepted: say until when."""

    async def shutdown(sockets: Any = None) -> None:
        scheduler.end = time.monotonic() + settings.drain_seconds
        await shut_down(sockets)

    return shutdown


def bound(settings: Settings) -> socket.socket:
    """A socket at the wished address, before anything heavy is loaded."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listening = socket.socket(family)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        with told_if_taken(settings):
            listening.bind((settings.host, settings.port))
    except EngineError:
        listening.close()
        raise
    return listening


@contextmanager
def told_if_taken(settings: Settings) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise EngineError(
            f"cannot listen at {settings.host} port {settings.port}: {error.strerror or error}. Choose others with "
            "--host and --port"
        ) from error


def address(listening: socket.socket, settings: Settings) -> str:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"http://{host}:{listening.getsockname()[1]}"
