"""What is wrong with a request that does not have the shape it should: one place in it, and one sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import LONGEST_QUOTED
from .refusals import Refusal, bad
from .schema import ABSENT


def malformed(error: Mapping[str, Any], body: Any) -> Refusal:
    """Of an error that pydantic found."""
    place = ".".join(_names(error["loc"], body))[:LONGEST_QUOTED]
    told = str(error["msg"]).removeprefix("Value error, ")
    if isinstance(body, bytes):  # it was not sent as JSON, so it was not read
        told = "expected JSON; send it with the header Content-Type: application/json"
    elif error["type"] == "extra_forbidden":
        told = "there is no such parameter"
    elif place.partition(".")[0] in ABSENT:
        told = f"this server has nothing of the kind; leave it out ({told})"
    return bad(f"the request is malformed: {f'{place}: {told}' if place else told}", place or None)


def _names(loc: Sequence[str | int], body: Any) -> list[str]:
    """The keys on the way to an error, without the forms of values that pydantic tried."""
    names: list[str] = []
    for part in loc[1:]:  # the first is "body"
        if isinstance(part, str) and isinstance(body, dict):
            names.append(part)
            body = body.get(part)
        elif isinstance(part, int) and isinstance(body, list):
            body = body[part] if part < len(body) else None
    return names
