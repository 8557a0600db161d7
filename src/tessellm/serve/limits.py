"""How long a client may take to send or read, and how many connections the process has descriptors for."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

MOST_DESCRIPTORS = 1 << 16  # the soft limit is raised to the hard one, up to this
MOST_CONNECTIONS = 4096
WITHOUT_LIMIT = 512  # descriptors, on systems that do not tell
OWN = 64  # descriptors for files, libraries and the event loop


@dataclass(frozen=True)
class Limits:
    """Seconds per phase of a connection, and bounds on what it may send."""

    header_seconds: float = 20.0  # from the first byte, or from connecting, to the end of the header
    body_seconds: float = 60.0  # from the end of the header to the end of the body
    idle_seconds: float = (
        75.0  # between two requests: more than clients wait, so that none is closed as it is used again
    )
    stalled_seconds: float = 60.0  # a client reads nothing of its answer
    parting_seconds: float = 5.0  # to read the rest of an answer once the connection or the server ends
    connections: int = MOST_CONNECTIONS
    accepted_at_once: int = 128  # before the first of them is looked at
    body_parts: int = 1 << 14  # pieces that a body may come in: each is an event, however small


def limits_of_process() -> Limits:
    """Limits that leave descriptors for everything that is not a connection."""
    descriptors = raise_descriptors()
    at_once = max(1, min(Limits.accepted_at_once, descriptors // 8))
    room = descriptors - OWN - 2 * at_once  # a batch may come while the one before it is being closed
    return Limits(connections=max(1, min(MOST_CONNECTIONS, room)), accepted_at_once=at_once)


def raise_descriptors() -> int:
    """Raise the soft limit on descriptors to the hard one; return what it is then."""
    try:
        import resource
    except ImportError:  # no such limit on Windows
        return WITHOUT_LIMIT
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):  # macOS allows less than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else min(soft, MOST_DESCRIPTORS)
