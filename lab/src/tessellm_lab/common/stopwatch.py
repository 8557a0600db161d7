"""How long an experiment took that was made in several calls."""

from __future__ import annotations

from time import monotonic


class Stopwatch:
    """Seconds of this call, and of those before it as their state tells them."""

    def __init__(self, before: float = 0.0):
        self.before, self.began = before, monotonic()

    @property
    def seconds(self) -> float:
        return self.before + monotonic() - self.began
