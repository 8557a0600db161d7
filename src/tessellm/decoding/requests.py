"""Request: one sequence on its way through the engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from .sampling import Sampling
from .voices import Voice, Watcher

_NUMBERS = count()


@dataclass(eq=False)
class Request:
    """A prompt, what was asked for, and what has come of it so far."""

    prompt: list[int]
    sampling: Sampling
    voice: Voice | None = None  # None: the composition's own rule
    watcher: Watcher | None = None
    number: int = field(default_factory=_NUMBERS.__next__)
    tokens: list[int] = field(default_factory=list)  # written so far, an end token included
    logprobs: list[float] = field(default_factory=list)  # of each, under the composition
    seen: list[dict[str, Any]] = field(default_factory=list)  # by the watcher, of each token
    finish_reason: str | None = None  # stop: an end token; length: max_new_tokens; cancelled; error
    error: str | None = None
    submitted: float = field(default_factory=time.monotonic)
    first_token: float | None = None  # when it came
    slot: int | None = None
    fed: int = 0  # how much of the prompt is in the cache
    asked: int = 0  # tokens that were asked of the device, some of them perhaps not yet here
    text: Any = None  # what drafts are looked up in
    chances: dict[int, Any] = field(default_factory=dict)  # how often drafts of each kind were right

    @property
    def done(self) -> bool:
        return self.finish_reason is not None

    @property
    def prefilled(self) -> bool:
        return self.fed == len(self.prompt)

    def finish(self, reason: str, error: str | None = None) -> None:
        self.finish_reason, self.error = reason, error

    def receive(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        if self.first_token is None:
            self.first_token = time.monotonic()
        self.tokens += tokens
        self.logprobs += logprobs
