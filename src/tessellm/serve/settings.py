"""What the person who starts a server decides."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import RecipeError

PARTING = 10  # seconds to tell clients that their time is over
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


@dataclass(frozen=True)
class Settings:
    """Where to listen, whom to let in, and how much anyone may ask for."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    slots: int = 16  # requests that run at once
    context: int | None = None  # tokens a slot holds
    queue: int = 256  # requests that may wait; more are told to come back
    seconds: float = 600.0  # a request may take
    drain_seconds: float = 60.0  # accepted requests have, when the server is told to stop
    body_bytes: int = 1 << 20
    choices: int = 16  # prompts times n, in one request
    log_prompts: bool = False
    reference: bool = False  # run members as the reference model does, though the fast path may know them

    def __post_init__(self) -> None:
        for name in ("slots", "choices", "body_bytes"):
            if getattr(self, name) < 1:
                raise RecipeError(f"expected at least 1 for {name}; got {getattr(self, name)}")
        for name in ("seconds", "drain_seconds"):
            if not getattr(self, name) > 0:
                raise RecipeError(f"expected a positive number for {name}; got {getattr(self, name)}")
        if self.queue < 0:
            raise RecipeError(f"expected at least 0 for queue; got {self.queue}")
        if self.api_key is not None and not self.api_key.strip():
            raise RecipeError("the API key is empty; leave it out to let everyone in")

    @property
    def last_resort_seconds(self) -> int | None:
        """After which connections are cut that should have ended when told to; None where there is no end."""
        return None if math.isinf(self.drain_seconds) else math.ceil(self.drain_seconds) + PARTING

    @property
    def local(self) -> bool:
        return self.host in LOOPBACK
