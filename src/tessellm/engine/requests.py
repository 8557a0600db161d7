"""Request: one sequence on its way through the engine. Knows token ids, neither texts nor models."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol

from torch import Tensor

from ..errors import GenerationError, MemberError, PromptError, nearest, quoted
from ..model.cache import Observer
from ..model.room import SLOT, check_room
from ..routing.route import Route
from .components import Components
from .sampling import Sampling, TokenChoice

_NUMBERS = count()
NEVER: frozenset[int] = frozenset()  # no token ends a text
ALL = -1  # the branch of an executor that runs all members as one


class Form(Protocol):
    """What a text is held to, token by token."""

    failure: str | None  # why no token may follow

    def allowed(self) -> Tensor:
        """Return which tokens may come next: [V]."""

    def accept(self, token: int) -> None:
        """Go on behind a token that was chosen."""


@dataclass(eq=False)
class Branch:
    """One member reading one sequence."""

    computed: int = 0  # prompt tokens in its KV row
    logp_V: Tensor | None = None  # behind the prompt's last token
    energies: list[Tensor] = field(default_factory=list)  # of the base, while it routes: [tokens, blocks, experts] each


@dataclass(eq=False)
class Request:
    """A prompt, the sampling parameters, and the tokens written so far."""

    prompt: list[int]
    sampling: Sampling
    experts: Mapping[str, float] | None = None  # weights by name, the one component; None: as the composition mixes
    observer: Observer | None = None
    observes_all: bool = False  # every member runs for the observer, also those that are not active
    form: Form | None = None  # tokens are chosen among those that it allows
    number: int = field(default_factory=_NUMBERS.__next__)
    tokens: list[int] = field(default_factory=list)  # written so far, an end token included
    logprobs: list[float] = field(default_factory=list)  # per token, under the composition
    seen: list[dict[str, Any]] = field(default_factory=list)  # per token, what the observer returned
    finish_reason: str | None = None  # stop: an end token; length: max_new_tokens; cancelled; error
    error: str | None = None
    submitted: float = field(default_factory=time.monotonic)
    first_token: float | None = None  # when the first token arrived
    route: Route | None = None
    components: Components | None = None  # None until the prompt is routed
    log_pi_C: Tensor | None = None  # the posterior
    branches: dict[int, Branch] = field(default_factory=dict)  # by member
    scheduled: int = 0  # new tokens that the executor computes or computed; some may not have arrived
    kv_len: int = 0  # cells that the next decode step reads: the prompt's, and one per scheduled token
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
        """The tokens that a draft may have: verification adds one more."""
        return self.sampling.max_new_tokens - self.scheduled - 1 if self.drafts else 0

    @property
    def is_read(self) -> bool:
        """Whether all branches have computed the prompt."""
        return all(branch.computed == len(self.prompt) for branch in self.branches.values())

    def advance(self, scheduled: int) -> bool:
        """Note how many new tokens are scheduled; True when no more are wanted."""
        self.scheduled += scheduled
        self.kv_len = len(self.prompt) + self.scheduled
        return self.scheduled == self.sampling.max_new_tokens

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
class RequestLimits:
    """What an engine can fulfil."""

    vocabulary: int  # token ids
    context: int  # tokens per slot
    drafts: bool  # speculation was requested: refuse requests that cannot use it
    members: tuple[str, ...] = ()
    forms: bool = True  # texts can be held to a form

    def check(self, request: Request) -> Request:
        """Return the request if it can be fulfilled; changes nothing, so any thread may call it."""
        new = request.sampling.max_new_tokens
        if not request.prompt:
            raise PromptError("the prompt is empty: expected at least one token id")
        if not all(0 <= token < self.vocabulary for token in request.prompt):
            wrong = next(token for token in request.prompt if not 0 <= token < self.vocabulary)
            raise PromptError(f"expected token ids from 0 to {self.vocabulary - 1}; got {wrong}")
        check_room(
            len(request.prompt), new, self.context, option="max_new_tokens, or make the engine larger", whose=SLOT
        )
        for name in request.experts or ():
            if name not in self.members[1:]:
                raise MemberError(f"there is no expert {quoted(name)}; {nearest(name, self.members[1:])}")
        if request.form is not None and not self.forms:
            raise GenerationError(
                "steps that are captured on a GPU hold no text to a form. Leave out the schema, or run members as they "
                "are (--engine plain)"
            )
        if self.drafts and request.penalised:
            raise GenerationError("drafts are checked position by position: no penalties for what was written before")
        return request
