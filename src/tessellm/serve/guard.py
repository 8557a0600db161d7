"""What stands before every request: who may ask, from where, how much; and headers that keep browsers in check."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Callable
from typing import Any

from starlette.exceptions import HTTPException

from .refusals import Refusal
from .settings import Settings

PAGE = {  # what the playground is made of: path, file and kind
    "/": ("play.html", "text/html"),
    **{f"/{name}": (name, "text/javascript") for name in ("play.js", "play-ask.js", "play-route.js", "play-view.js")},
    "/play.css": ("play.css", "text/css"),
}
OPEN = frozenset({*PAGE, "/health", "/health/ready", "/ready"})  # without a key: they tell nothing of the model
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; img-src data:"
)
HEADERS = [
    (b"content-security-policy", CSP.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
]


class Guard:
    """An ASGI application around another."""

    def __init__(self, app: Any, settings: Settings, counted: Callable[[str, int], None]):
        self.app, self.settings, self.counted = app, settings, counted
        self.digest = _digest(_bytes(settings.api_key)) if settings.api_key else None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def answer(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *HEADERS]}
                self.counted(scope["path"], message["status"])
            await send(message)

        headers = dict(scope["headers"])
        try:
            self._check(scope["path"], headers)
        except Refusal as refusal:
            await _refuse(refusal, answer)
            return
        if scope["method"] == "HEAD":  # the same as GET, of which the connection leaves out the body
            scope = {**scope, "method": "GET"}
        await self.app(scope, self._limited(receive), answer)

    def _check(self, path: str, headers: dict[bytes, bytes]) -> None:
        host = _host(headers.get(b"host", b""))
        if not self.settings.answers_to(host):
            message = f"this server does not answer to the host {host!r}; start it with --allowed-host to add a name"
            raise Refusal(421, message, None, "wrong_host")
        if self.digest is not None and path not in OPEN:
            scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
            right = hmac.compare_digest(_digest(key.strip()), self.digest)
            if scheme.lower() != b"bearer" or not right:
                raise Refusal(
                    401, "expected the header Authorization: Bearer KEY with this server's key", None,
                    "invalid_api_key", "authentication_error", {"WWW-Authenticate": "Bearer"},
                )  # fmt: skip
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > self.settings.body_bytes:
            raise Refusal(413, f"a request may have {self.settings.body_bytes} bytes", None, "body_too_large")

    def _limited(self, receive: Any) -> Any:
        """The same, until there is more of a body than allowed."""
        total = 0

        async def limited() -> Any:
            nonlocal total
            message = await receive()
            total += len(message.get("body", b""))
            if total > self.settings.body_bytes:
                raise HTTPException(413, f"a request may have {self.settings.body_bytes} bytes")
            return message

        return limited


def _bytes(key: str) -> bytes:
    """As it stands in a header: a variable of the environment may hold any bytes, and end in a new line."""
    return key.strip().encode("utf-8", "surrogateescape")


def _digest(key: bytes) -> bytes:
    """Keys of one length, so that comparing them tells nothing."""
    return hashlib.sha256(key).digest()


def _host(header: bytes) -> str:
    """Without the port."""
    name = header.decode("latin-1").strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.rpartition(":")[0] if name.rpartition(":")[2].isdigit() and ":" in name else name


async def _refuse(refusal: Refusal, send: Any) -> None:
    headers = [(name.lower().encode(), value.encode()) for name, value in refusal.headers.items()]
    headers.append((b"content-type", b"application/json"))
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(refusal.body).encode()})
