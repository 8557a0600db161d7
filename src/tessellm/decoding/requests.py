"""Request: one sequence on its way through the engine. Knows token ids, neither texts nor models."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from ..errors import GenerationError, PromptError
from ..model.cache import Observer
from ..model.room import SLOT, check_room
from .buffers import StepResult
from .sampling import Sampling, TokenChoice
from .voices import SpecialRows, Voice

_NUMBERS = count()
NEVER: frozenset[int] = frozenset()  # no token ends a text


@dataclass(eq=False)
class Request:
    """A prompt, what was asked for, and the tokens written so far."""

    prompt: list[int]
    sampling: Sampling
    voice: Voice | None = None  # None: the composition's own rule
    observer: Observer | None = None
    number: int = field(default_factory=_NUMBERS.__next__)
    tokens: list[int] = field(default_factory=list)  # written so far, an end token included
    logprobs: list[float] = field(default_factory=list)  # per token, under the composition
    seen: list[dict[str, Any]] = field(default_factory=list)  # per token, what the observer returned
    finish_reason: str | None = None  # stop: an end token; length: max_new_tokens; cancelled; error
    error: str | None = None
    submitted: float = field(default_factory=time.monotonic)
    first_token: float | None = None  # when the first token arrived
    read_from: int = 0  # the first prompt token whose log-probabilities the rule reads
    fed: int = 0  # prompt tokens in the cache
    asked: int = 0  # tokens that the device was asked for; some may not have arrived
    cells: int = 0  # that the next step reads: the prompt's, and one per token asked for
    drafts: bool = True  # False after a draft that a member cannot read

    @property
    def done(self) -> bool:
        return self.finish_reason is not None

    @property
    def penalised(self) -> bool:
        """Whether tokens cost that were written before."""
        return self.sampling.choice is TokenChoice.PENALISED

    @property
    def room(self) -> int:
        """Count the tokens that a draft may have: verification adds one more."""
        return self.sampling.max_new_tokens - self.asked - 1 if self.drafts else 0

    def advance(self, fed: int = 0, asked: int = 0) -> bool:
        """Note how many tokens of the prompt were fed and how many new ones asked for; True when no more are wanted."""
        self.fed += fed
        self.asked += asked
        self.cells = len(self.prompt) + self.asked
        return self.asked == self.sampling.max_new_tokens

    def stop_drafts(self) -> None:
        self.drafts = False

    def finish(self, reason: str, error: str | None = None) -> None:
        self.finish_reason, self.error = reason, error

    def receive(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        ends: frozenset[int],
        views: Sequence[dict[str, Any]] = (),
    ) -> None:
        """Add tokens up to an end token, the length asked for, or one without a log-probability; finish there.
        `views`: what an observer returned, per token, and perhaps for more."""
        if self.first_token is None:
            self.first_token = time.monotonic()
        ends = NEVER if self.sampling.ignore_end else ends
        kept = min(len(tokens), self.sampling.max_new_tokens - len(self.tokens))
        if not ends.isdisjoint(tokens) or any(map(math.isnan, logprobs)):
            pairs = enumerate(zip(tokens, logprobs, strict=True), 1)
            kept = min(kept, next(n for n, (token, logprob) in pairs if token in ends or math.isnan(logprob)))
        self.tokens += tokens[:kept]
        self.logprobs += logprobs[:kept]
        self.seen += views[:kept]
        if tokens and self.tokens[-1] in ends:
            self.finish("stop")
        elif len(self.tokens) == self.sampling.max_new_tokens:
            self.finish("length")


@dataclass(frozen=True)
class Arrival:
    """A pass whose results may still be on their way to the host."""

    requests: Sequence[Request]
    slots: Sequence[int]  # that it wrote
    fed: Sequence[int]  # tokens of each prompt
    asked: Sequence[int]  # new tokens of each request
    fetch: Callable[[], StepResult]
    special: SpecialRows | None = None


@dataclass(frozen=True)
class RequestLimits:
    """What an engine can fulfil."""

    vocabulary: int  # token ids
    context: int  # cells per slot
    window: int  # positions that rules may look back
    drafts: bool  # were asked for by name: requests that cannot have some are refused

    def check(self, request: Request) -> Request:
        """Return the request if it can be fulfilled; changes nothing, so any thread may call it."""
        new, voice = request.sampling.max_new_tokens, request.voice
        if not request.prompt:
            raise PromptError("the prompt is empty: expected at least one token id")
        if not all(0 <= token < self.vocabulary for token in request.prompt):
            wrong = next(token for token in request.prompt if not 0 <= token < self.vocabulary)
            raise PromptError(f"expected token ids from 0 to {self.vocabulary - 1}; got {wrong}")
        check_room(
            len(request.prompt), new, self.context, option="max_new_tokens, or make the engine larger", whose=SLOT
        )
        if self.drafts and request.penalised:
            raise GenerationError("drafts are checked position by position: no penalties for what was written before")
        if self.drafts and (voice or request.observer):
            raise GenerationError("drafts are checked by the composition's own rule: no other voices, no observers")
        if voice and voice.rule.window > self.window:
            raise GenerationError(
                f"the rule {voice.rule.name!r} looks back {voice.rule.window} tokens, this engine {self.window}: make "
                f"it with window={voice.rule.window}"
            )
        return request
