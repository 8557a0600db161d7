"""What the person who starts a server decides."""

from __future__ import annotations

import ipaddress
import math
import socket
from dataclasses import dataclass
from pathlib import Path

from ..engine.speculation import Speculation
from ..errors import RecipeError

PARTING = 10  # seconds to tell clients that their time is over
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


@dataclass(frozen=True)
class Settings:
    """Where to listen, whom to let in, and how much anyone may ask for."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    allowed_hosts: tuple[str, ...] = ()  # names in the header Host, beside those of this machine; * is any
    slots: int | None = None  # requests that run at once; None: what a share of the free memory holds
    context: int | None = None  # tokens per slot; None: what the members read, as far as there is memory
    queue: int = 256  # requests that may wait; more are told to come back
    seconds: float = 600.0  # a request may take
    drain_seconds: float = 60.0  # accepted requests have, when the server is told to stop
    body_bytes: int = 1 << 20
    choices: int = 16  # prompts times n, in one request
    log_prompts: bool = False
    plain: bool = False  # run members as they are, though the fast path may know them
    speculate: str | None = None  # lookup or none
    updates: bool = False  # clients may load and unload experts, and save examples wherever they are
    folder: Path | None = None  # of the composition, where examples are saved

    def __post_init__(self) -> None:
        for name in ("slots", "choices", "body_bytes"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise RecipeError(f"expected at least 1 for {name}; got {getattr(self, name)}")
        for name in ("seconds", "drain_seconds"):
            if not getattr(self, name) > 0:
                raise RecipeError(f"expected a positive number for {name}; got {getattr(self, name)}")
        if self.speculate not in (None, "lookup", "none"):
            raise RecipeError(f"expected lookup or none for speculate; got {self.speculate!r}")
        if self.queue < 0:
            raise RecipeError(f"expected at least 0 for queue; got {self.queue}")
        if self.api_key is not None and not self.api_key.strip():
            raise RecipeError("the API key is empty; leave it out (unset TESSELLM_API_KEY) to let everyone in")

    @property
    def speculation(self) -> Speculation | None:
        return None if self.speculate is None else Speculation(self.speculate)

    @property
    def last_resort_seconds(self) -> int | None:
        """After which connections are cut that should have ended when told to; None where there is no end."""
        return None if math.isinf(self.drain_seconds) else math.ceil(self.drain_seconds) + PARTING

    @property
    def may_change(self) -> bool:
        """Whether clients may save examples."""
        return self.local or self.updates

    @property
    def local(self) -> bool:
        """Whether only this machine can reach the server."""
        address = _address(self.host)
        return self.host in LOOPBACK or (address is not None and address.is_loopback)

    def answers_to(self, name: str) -> bool:
        """Whether a request may name this host. A page of another site can rebind a name of its own to this machine,
        but not an address: so where other machines may ask any address or none will do, and of names those we know."""
        known = {name.lower() for name in (*LOOPBACK, self.host, *self.allowed_hosts)}
        if name in known or "*" in known:
            return True
        return not self.local and (not name or _address(name) is not None or name in _own_names())


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _own_names() -> set[str]:
    """What this machine is called, with and without its domain."""
    name = socket.gethostname().lower()
    return {name, name.partition(".")[0], f"{name.partition('.')[0]}.local"}
