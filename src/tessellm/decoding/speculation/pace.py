"""Pace: choose how long drafts are, from their acceptance rates and from what passes cost, both learnt on the way.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..buffers import row_bucket
from .costs import CPU, Costs, expected

KEEP_OWN = 0.9  # weight of a request's earlier drafts after each later one
KEEP_ALL = 0.99  # weight of all requests' earlier drafts after each later one
FADE = 0.998  # weight of earlier drafts after a step that could have drafted and did not
PRIOR_ACCEPTED, PRIOR_JUDGED = 3.0, 4.0  # tokens before any were seen: a drafter is tried before it is judged
SHARED_TOKENS = 4.0  # tokens that the rate of all requests counts for in the rate of one
NEWEST = 0.3  # weight of the last measurement of a cost
HICCUP = 3.0  # the host's time is not believed to have grown by more than this factor at once
AGEING = 0.003  # share by which an old measurement gets cheaper per step: bounds what trying again costs
WORTH = 1.02  # a draft must promise this factor over a step without
LOST, LOST_AT_FIRST = 0.1, 2.0  # steps that wrong drafts may cost a text: per token written, and before the first
ONE_MEMBER = Costs(CPU, 1)


@dataclass
class AcceptanceCount:
    """Accepted tokens of drafts, and tokens that were judged."""

    right: float = 0.0
    judged: float = 0.0

    def add(self, right: int, judged: int, keep: float) -> None:
        self.right, self.judged = self.right * keep + right, self.judged * keep + judged


NONE = AcceptanceCount()
Counts = defaultdict[int, AcceptanceCount]  # by kind of draft


@dataclass
class TextDrafts:
    """What came of the drafts of one text. What they cost it is bounded, in steps of all members awake: with n tokens
    written, by LOST · n + LOST_AT_FIRST of them, whatever was right."""

    counts: Counts = field(default_factory=lambda: defaultdict(AcceptanceCount))
    seen_right: bool = False  # whether a token that was drafted was accepted
    lost: float = 0.0  # steps that passes cost beyond the tokens that they brought

    def longest(self, prices: Mapping[int, float], written: int) -> int:
        """Find the longest draft that may bring no more than one token, of lengths, longest first, with the steps that
        their passes cost; 0: none."""
        return next((length for length, cost in prices.items() if self.can_lose(cost - 1, written)), 0)

    def can_lose(self, steps: float, written: int) -> bool:
        return self.lost + steps <= LOST * written + LOST_AT_FIRST


class AcceptanceRates:
    """Estimate how likely the next token of a draft is accepted: per kind of draft, over all texts and for each."""

    def __init__(self, known: Sequence[float] = ()) -> None:
        """`known`: the rate of each kind over all texts, where it is not to be learnt."""
        self._known = known
        self._all: Counts = defaultdict(AcceptanceCount)

    def rate(self, text: TextDrafts, kind: int) -> float:
        own, overall = text.counts.get(kind, NONE), self._known[kind] if self._known else self._learnt(kind)
        return (own.right + SHARED_TOKENS * overall) / (own.judged + SHARED_TOKENS)

    def _learnt(self, kind: int) -> float:
        every = self._all.get(kind, NONE)
        return (every.right + PRIOR_ACCEPTED) / (every.judged + PRIOR_JUDGED)

    def note(self, text: TextDrafts, kind: int, accepted: int, drafted: int) -> None:
        """Count a draft. Tokens behind the first wrong one were not judged."""
        judged = min(accepted + 1, drafted)
        text.counts[kind].add(accepted, judged, KEEP_OWN)
        text.seen_right = text.seen_right or accepted > 0
        if not self._known:
            self._all[kind].add(accepted, judged, KEEP_ALL)

    def fade(self, text: TextDrafts, kind: int) -> None:
        """Let counts fade where no draft was made, so that drafts are tried again some day."""
        for counts in (self._all, text.counts):
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


@dataclass
class ModelledPace(Pace):
    """Choose by a model of what passes cost (costs.py), not by what they took: so that what is written depends on what
    was said alone, also where a tie within rounding falls another way in a longer pass. Only where a pass may not take
    longer than some seconds, as in a server, it counts what the model's unit takes."""

    costs: Costs = ONE_MEMBER
    writers: int = 1  # members that draft, for some rows each
    _unit: float | None = None  # seconds of a pass of one full member over one token
    _priced: dict[tuple[int, int, int], float] = field(default_factory=dict)  # by rows, length and writers

    def set_device_time(self, rows: int, length: int, seconds: float) -> None:
        pass

    def note(self, rows: int, length: int, seconds: float) -> None:
        self.steps += 1
        unit = seconds / self._cost(rows, length)
        self._unit = unit if self._unit is None else self._unit + NEWEST * (min(unit, HICCUP * self._unit) - self._unit)

    def longest_within(self, rows: int, seconds: float) -> int:
        """Find the longest draft whose pass takes no more than so many seconds; 0: none."""
        if self._unit is None or seconds == math.inf:
            return self.lengths[-1]
        return max((each for each in self.lengths if self._unit * self._cost(rows, each) <= seconds), default=0)

    def _cost(self, rows: int, length: int) -> float:
        key = rows, length, self.writers
        if key not in self._priced:
            self._priced[key] = self._price(*key)
        return self._priced[key]

    def _price(self, rows: int, length: int, writers: int) -> float:
        if not length:
            return self.costs.step(rows)
        return self.costs.block(rows, length, writers) if self.costs.takes(rows, length) else math.inf

    def in_steps(self, rows: int, length: int, in_vain: int = 0) -> float:
        """Price a pass in steps of all members awake, and so many tokens that members began with in vain."""
        return (self._cost(rows, length) + in_vain * self.costs.draft(rows)) / self._cost(rows, 0)

    def prices(self, rows: int) -> dict[int, float]:
        """Price passes with drafts in steps of all members awake: lengths that fast kernels take, longest first."""
        lengths = [length for length in reversed(self.lengths) if self.costs.takes(rows, length)]
        return {length: self.in_steps(rows, length) for length in lengths}
