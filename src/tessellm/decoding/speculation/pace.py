"""Pace: how long drafts should be, from how often they were right and from what passes cost, both as they go.

A draft of G tokens, each right with chance a, brings 1 + a + … + a^G tokens. The length that brings the most tokens a
second is taken; where drafts are useless that is 0, an ordinary step. Old measurements of a cost are believed less and
less, so every length is tried again now and then, rarely if it is expensive.

Where the device told what its part of a pass takes (a captured graph, when it is new), nothing need be tried: the
host's part is the same whatever the length, and every pass measures it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..requests import Request

FORGET_REQUEST = 0.9  # what an observation of a request keeps of those before it
FORGET_ALL = 0.99  # and one of any request
FADE = 0.998  # what counts keep when there was a draft to be had and none was made
HOPED, OF = 3.0, 4.0  # right tokens of so many, before any were seen: a drafter is tried before it is judged
PRIOR = 4.0  # what all requests together count for in the chance of one, in observations
NEWEST = 0.3  # what the last measurement of a cost counts
HICCUP = 3.0  # what the host took is not believed to have grown by more than this at once
AGEING = 0.003  # how much cheaper an old measurement is taken to be with each step: bounds what trying again costs
WORTH = 1.02  # a draft must promise this much more than a step without


@dataclass
class Count:
    """Right tokens of drafts, and tokens that were judged."""

    right: float = 0.0
    judged: float = 0.0

    def add(self, right: int, judged: int, keep: float) -> None:
        self.right, self.judged = self.right * keep + right, self.judged * keep + judged


NONE = Count()


class Chances:
    """How likely the next token of a draft is right: by kind of draft, for all requests and for each."""

    def __init__(self) -> None:
        self._all: dict[int, Count] = {}

    def of(self, request: Request, kind: int) -> float:
        every, own = self._all.get(kind, NONE), request.chances.get(kind, NONE)
        overall = (every.right + HOPED) / (every.judged + OF)
        chance: float = (own.right + PRIOR * overall) / (own.judged + PRIOR)
        return chance

    def note(self, request: Request, kind: int, right: int, drafted: int) -> None:
        """Of a draft, the first `right` tokens were: those behind the first wrong one say nothing."""
        judged = min(right + 1, drafted)
        for counts, keep in ((self._all, FORGET_ALL), (request.chances, FORGET_REQUEST)):
            if kind not in counts:
                counts[kind] = Count()
            counts[kind].add(right, judged, keep)

    def fade(self, request: Request, kind: int) -> None:
        """No draft was made, so nothing was learnt: what was known counts less, and drafts are tried again some day."""
        for count in (self._all.get(kind), request.chances.get(kind)):
            if count is not None:
                count.add(0, 0, FADE)


@dataclass(frozen=True)
class Cost:
    """What passes of one kind took."""

    seconds: float | None  # None after the first, which may have prepared something
    at: int  # the step of the last one


@dataclass
class Pace:
    """Which of some lengths the next drafts should have."""

    lengths: Sequence[int]
    clock: Callable[[], float] = time.perf_counter
    steps: int = 0
    _costs: dict[tuple[int, int], Cost] = field(default_factory=dict)
    _device: dict[tuple[int, int], float] = field(default_factory=dict)  # seconds of its part of a pass
    _host: dict[int, float] = field(default_factory=dict)  # and of the rest, by rows

    def choose(self, rows: int, hopes: Sequence[tuple[float, int]]) -> int:
        """The best length for rows that hope for a chance of right tokens, up to a number of them."""
        cost = self._cost(rows, 0)
        if cost is None or not any(chance > 0 and most > 0 for chance, most in hopes):
            return 0
        best, fastest = 0, WORTH * len(hopes) / cost
        for length in self.lengths:
            measured = self._cost(rows, length)
            cost = cost if measured is None else measured  # as cheap as the next shorter until it is measured
            tokens_a_second = sum(expected(chance, min(length, most)) for chance, most in hopes) / cost
            if tokens_a_second > fastest:
                best, fastest = length, tokens_a_second
            if measured is None:
                break
        return best

    def told(self, rows: int, length: int, seconds: float) -> None:
        """What the device takes for a pass."""
        self._device[bucket(rows), length] = seconds

    def note(self, rows: int, length: int, seconds: float) -> None:
        """What a pass took."""
        self.steps += 1
        key, before = (bucket(rows), length), self._cost(rows, length)
        if key in self._device:
            rest = max(0.0, seconds - self._device[key])
            host = self._host.get(key[0], rest)
            self._host[key[0]] = host + NEWEST * (min(rest, HICCUP * host) - host)
            return
        if key not in self._costs:
            self._costs[key] = Cost(None, self.steps)
        else:
            self._costs[key] = Cost(seconds if before is None else before + NEWEST * (seconds - before), self.steps)

    def _cost(self, rows: int, length: int) -> float | None:
        key = bucket(rows), length
        if key in self._device:
            device, host = self._device[key], self._host.get(key[0], 0.0)
            return device + host if length else max(device, host)  # steps need not wait for one another
        cost = self._costs.get(key)
        if cost is None or cost.seconds is None:
            return None
        return cost.seconds * (1 - AGEING) ** (self.steps - cost.at)


def expected(chance: float, length: int) -> float:
    """Tokens that a draft brings: 1 + a + … + a^length."""
    return length + 1.0 if chance >= 1 else (1 - chance ** (length + 1)) / (1 - chance)


def bucket(rows: int) -> int:
    """The next power of two."""
    return 1 << (rows - 1).bit_length()
