"""Requests that somebody might send to a server: right ones with odd values in odd places, by seed. Sends nothing."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**63, 10**400, 0.5, -0.0, 1e308, "", " ", "0.5", "\x00", "é\u202e",
    "a" * 5000, "<|im_end|>", [], [[]], [""], [0], [-1], [10**9], [[1, 2], [3]], ["a", 1], {}, {"a": 1}, {"": {}},
    {"role": "user"}, {"type": "text", "text": "a"},
)  # fmt: skip
FIELDS = (
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "n", "seed",
    "stop", "stream", "stream_options", "tessellm", "logprobs", "top_logprobs", "echo", "frequency_penalty",
    "presence_penalty", "logit_bias", "response_format", "tools", "user", "metadata", "unknown",
)  # fmt: skip
RULES = ("product", "mixture", "auto", "produkt")
BODIES = (b"", b"null", b"[]", b"{", b'{"a":' * 2000, b"\xff\xfe", b'{"model": NaN}', b'"' + b"a" * 4000 + b'"')
PATHS = ("/v1/completions", "/v1/chat/completions")


def odd_requests(model: str, seed: int) -> Iterator[tuple[str, dict[str, Any] | bytes]]:
    """Paths and bodies without end; texts stay short, so that answers do."""
    rng = random.Random(seed)
    while True:
        path = rng.choice(PATHS)
        yield path, rng.choice(BODIES) if rng.random() < 0.05 else _body(path, model, rng)


def _body(path: str, model: str, rng: random.Random) -> dict[str, Any]:
    body: dict[str, Any] = {"model": model, "max_tokens": rng.choice((1, 2, 3)), "stream": rng.random() < 0.3}
    body |= {"prompt": "Hello"} if path == PATHS[0] else {"messages": [{"role": "user", "content": "Hello"}]}
    if rng.random() < 0.3:
        body["tessellm"] = {"rule": rng.choice(RULES), "trace": rng.random() < 0.5}
    for field in rng.sample(FIELDS, rng.choice((0, 1, 2, 3, 4))):
        body[field] = rng.choice(ODD)
    if body.get("max_tokens") is None and body.get("max_completion_tokens") is None:
        body["max_tokens"] = 1  # else it writes what there is room for
    return body
