"""A running server: a socket, uvicorn on it, and an orderly end. What `tessellm serve` starts."""

from __future__ import annotations

import gc
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ..errors import EngineError, require
from .limits import limits_of_process
from .settings import Settings


def serve(load: Callable[[], Any], name: str, settings: Settings, tell: Callable[[str], None]) -> None:
    """Listen, load, serve until told to stop; then finish what was accepted. `load` makes the composition."""
    require("uvicorn", "serve"), require("fastapi", "serve")
    with bound(settings) as listening:
        from .app import make_app
        from .draining import DrainingServer
        from .service import Service

        logging.basicConfig(format="%(asctime)s %(name)s %(message)s", level=logging.WARNING)
        logging.getLogger("tessellm.serve").setLevel(logging.INFO)
        limits = limits_of_process()
        service = Service(load(), name, settings)
        server = DrainingServer(make_app(service), service.end_at, settings, limits)
        gc.collect()
        gc.freeze()  # what was loaded stays: looking through it for garbage would hold everyone up for half a second
        with told_if_taken(settings):
            listening.listen()
        signal.signal(signal.SIGTERM, lambda *_: setattr(server, "should_exit", True))  # uvicorn's own raises it again
        tell(address(listening, settings))
        with suppress(KeyboardInterrupt):
            server.run(sockets=[listening])


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
