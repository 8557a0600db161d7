"""A running server: a socket, uvicorn on it, and an orderly end. What `tessellm serve` starts."""

from __future__ import annotations

import logging
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ..errors import EngineError, require
from .settings import Settings

BACKLOG = 2048  # connections that wait to be accepted


def serve(load: Callable[[], Any], name: str, settings: Settings, tell: Callable[[str], None]) -> None:
    """Listen, load, serve until told to stop; then finish what was accepted. `load` makes the composition."""
    uvicorn, _ = require("uvicorn", "serve"), require("fastapi", "serve")
    with bound(settings) as listening:
        from .app import make_app
        from .service import Service

        logging.basicConfig(format="%(asctime)s %(name)s %(message)s", level=logging.WARNING)
        logging.getLogger("tessellm.serve").setLevel(logging.INFO)
        app = make_app(Service(load(), name, settings))
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, server_header=False, lifespan="on",
            timeout_graceful_shutdown=int(settings.drain_seconds), h11_max_incomplete_event_size=1 << 16, ws="none",
        )  # fmt: skip
        server = uvicorn.Server(config)
        listening.listen(BACKLOG)
        tell(address(listening, settings))
        signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn's own drains, then raises the signal once more
        with suppress(KeyboardInterrupt):
            server.run(sockets=[listening])


def bound(settings: Settings) -> socket.socket:
    """A socket at the wished address, before anything heavy is loaded."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listening = socket.socket(family)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((settings.host, settings.port))
    except OSError as error:
        listening.close()
        raise EngineError(
            f"cannot listen at {settings.host} port {settings.port}: {error.strerror}. Choose another with --port"
        ) from error
    return listening


def address(listening: socket.socket, settings: Settings) -> str:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"http://{host}:{listening.getsockname()[1]}"
