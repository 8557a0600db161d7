"""What a client is told when it cannot have what it asked for: OpenAI's shape of an error, and its status."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

LONGEST = 500  # characters of a message: what came is quoted in some


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(BaseModel):
    error: ErrorBody


class Refusal(Exception):  # noqa: N818
    """A request that is refused, or that failed."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.headers = status, headers or {}
        self.response = ErrorResponse(error=ErrorBody(message=plain(message), type=kind, param=param, code=code))

    @property
    def body(self) -> dict[str, Any]:
        return self.response.model_dump()


def plain(message: str) -> str:
    """Short, and possible to encode."""
    shown = message if len(message) <= LONGEST else message[: LONGEST - 1] + "…"
    return shown.encode("utf-8", "replace").decode("utf-8")


def bad(message: str, param: str | None = None, code: str | None = None) -> Refusal:
    return Refusal(400, message, param, code)


def busy(seconds: int) -> Refusal:
    message = f"all slots are taken and the queue is full; come back in {seconds} s"
    return Refusal(429, message, None, "queue_full", "rate_limit_error", {"Retry-After": str(seconds)})


def unavailable(message: str) -> Refusal:
    return Refusal(503, message, None, "unavailable", "server_error", {"Retry-After": "10"})


def too_slow(seconds: float) -> Refusal:
    message = f"the request took longer than {seconds:g} s; ask for fewer tokens, or come back when there is less to do"
    return Refusal(504, message, None, "timeout", "server_error")


def slow_request(part: str, seconds: float) -> Refusal:
    return Refusal(408, f"the {part} of the request did not come within {seconds:g} s", None, "request_timeout")


def broken(message: str) -> Refusal:
    return Refusal(500, message, None, "generation_failed", "server_error")
