"""Choose how long drafts are, from their acceptance rates and from what passes cost, both learnt on the way.

A draft of G tokens, each accepted with probability a, brings 1 + a + … + a^G tokens. The length that brings the most
tokens per second is taken; where drafts are useless that is 0, an ordinary step. Old measurements of a cost count less
and less, so every length is tried again now and then, rarely if it is expensive.

Where the device reports the time of its part of a pass (a captured graph, when it is new), nothing need be tried: the
host's part is the same whatever the length, and every pass measures it.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..executor import row_bucket

KEEP_OWN = 0.9  # weight of a request's earlier drafts after each later one
KEEP_ALL = 0.99  # weight of all requests' earlier drafts after each later one
FADE = 0.998  # weight of earlier drafts after a step that could have drafted and did not
PRIOR_ACCEPTED, PRIOR_JUDGED = 3.0, 4.0  # tokens before any were seen: a drafter is tried before it is judged
SHARED_TOKENS = 4.0  # tokens that the rate of all requests counts for in the rate of one
NEWEST = 0.3  # weight of the last measurement of a cost
HICCUP = 3.0  # the host's time is not believed to have grown by more than this factor at once
AGEING = 0.003  # share by which an old measurement gets cheaper per step: bounds what trying again costs
WORTH = 1.02  # a draft must promise this factor over a step without


@dataclass
class AcceptanceCount:
    """Accepted tokens of drafts, and tokens that were judged."""

    right: float = 0.0
    judged: float = 0.0

    def add(self, right: int, judged: int, keep: float) -> None:
        self.right, self.judged = self.right * keep + right, self.judged * keep + judged


NONE = AcceptanceCount()
Counts = defaultdict[int, AcceptanceCount]  # by kind of draft


class AcceptanceRates:
    """Estimate how likely the next token of a draft is accepted: per kind of draft, over all texts and for each."""

    def __init__(self) -> None:
        self._all: Counts = defaultdict(AcceptanceCount)

    def rate(self, text: Counts, kind: int) -> float:
        own, every = text.get(kind, NONE), self._all.get(kind, NONE)
        overall = (every.right + PRIOR_ACCEPTED) / (every.judged + PRIOR_JUDGED)
        return (own.right + SHARED_TOKENS * overall) / (own.judged + SHARED_TOKENS)

    def note(self, text: Counts, kind: int, accepted: int, drafted: int) -> None:
        """Count a draft. Tokens behind the first wrong one were not judged."""
        judged = min(accepted + 1, drafted)
        text[kind].add(accepted, judged, KEEP_OWN)
        self._all[kind].add(accepted, judged, KEEP_ALL)

    def fade(self, text: Counts, kind: int) -> None:
        """Let counts fade where no draft was made, so that drafts are tried again some day."""
        for counts in (self._all, text):
            if kind in counts:
                counts[kind].add(0, 0, FADE)


@dataclass(frozen=True)
class Cost:
    """What passes of one length took."""

    seconds: float | None  # None after the first pass, which may have prepared something
    at: int  # the step that measured it last


@dataclass
class Pace:
    """Choose one of some lengths for the next drafts."""

    lengths: Sequence[int]
    clock: Callable[[], float] = time.perf_counter
    steps: int = 0
    _costs: dict[tuple[int, int], Cost] = field(default_factory=dict)
    _device: dict[tuple[int, int], float] = field(default_factory=dict)  # the device's seconds of a pass
    _host: dict[int, float] = field(default_factory=dict)  # the host's seconds, by rows

    def choose(self, rows: int, rates: Sequence[tuple[float, int]]) -> int:
        """Find the best length for rows with these acceptance rates and rooms."""
        cost = self._cost(rows, 0)
        if cost is None or not any(rate > 0 and room > 0 for rate, room in rates):
            return 0
        best, fastest = 0, WORTH * len(rates) / cost
        for length in self.lengths:
            measured = self._cost(rows, length)
            if measured == math.inf:
                continue
            cost = cost if measured is None else measured  # as cheap as the next shorter until it is measured
            speed = sum(expected(rate, min(length, room)) for rate, room in rates) / cost
            if speed > fastest:
                best, fastest = length, speed
            if measured is None:
                break
        return best

    def set_device_time(self, rows: int, length: int, seconds: float) -> None:
        """Note what the device takes for a pass."""
        self._device[row_bucket(rows), length] = seconds

    def note(self, rows: int, length: int, seconds: float) -> None:
        """Note what a pass took."""
        self.steps += 1
        key, before = (row_bucket(rows), length), self._cost(rows, length)
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
        key = row_bucket(rows), length
        if key in self._device:
            device, host = self._device[key], self._host.get(key[0], 0.0)
            return device + host if length else max(device, host)  # steps need not wait for one another
        cost = self._costs.get(key)
        if cost is None or cost.seconds is None:
            return None
        return cost.seconds * (1 - AGEING) ** (self.steps - cost.at)


def expected(rate: float, length: int) -> float:
    """Return the tokens that a draft brings on average: 1 + a + … + a^length."""
    return length + 1.0 if rate >= 1 else (1 - rate ** (length + 1)) / (1 - rate)
