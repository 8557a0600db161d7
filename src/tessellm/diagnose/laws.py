"""What a rule hears of its members: each expert tilted by its weight, all ways to stop as one event.

Everything that a trace measures, but for what it shows of the members themselves, is measured on these laws: an expert
with weight 0.5 is then at distance zero from itself, and end tokens that differ are no interference.

Shapes: M members (0 is the base), B batch, T time, V vocabulary, E end tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..rules import Product, Weighted, tilt
from ..rules.termination import Ends, Terminated, as_event, ends_of


@dataclass(frozen=True)
class Hearing:
    """A rule taken apart: the rule itself, the experts' weights, and the end tokens that it takes as one event."""

    rule: Any
    weights: tuple[float, ...] | None
    stops: tuple[tuple[int, ...], ...] | None

    @property
    def plain(self) -> bool:
        """Everyone is heard as is."""
        return self.weights is None and self.stops is None

    def members(self, logp_MBTV: Tensor) -> Tensor:
        """The members' laws."""
        if self.weights is not None:
            logp_MBTV = tilt(logp_MBTV, self.weights)
        return logp_MBTV if self.stops is None else as_event(logp_MBTV, self._ends(logp_MBTV))[0]

    def composed(self, logp_BTV: Tensor) -> Tensor:
        """The composition's law: any end token of any member is its own."""
        if self.stops is None:
            return logp_BTV
        ends = self._ends(logp_BTV)
        return as_event(logp_BTV[None], Ends(ends.token_E, torch.ones_like(ends.own_ME[:1])))[0][0]

    def event(self, law: Tensor) -> Tensor | None:
        """log h of each law, where stopping is an event of its own."""
        if self.stops is None:
            return None
        return law.index_select(-1, self._ends(law).token_E[:1])[..., 0]

    def _ends(self, logp: Tensor) -> Ends:
        assert self.stops is not None
        return ends_on(self.stops, logp.device)


@lru_cache(maxsize=64)
def ends_on(stops: tuple[tuple[int, ...], ...], device: torch.device) -> Ends:
    """`ends_of`, made once: making it waits for the device."""
    return ends_of(stops, device)


def hearing_of(rule: Any) -> Hearing:
    """Take a model's rule apart."""
    weights, stops = None, None
    if isinstance(rule, Weighted):
        weights, rule = rule.weights, rule.rule
    if isinstance(rule, Terminated):
        stops, rule = (rule.stops if rule.policy != "rule" else None), rule.rule
    if isinstance(rule, Product) and rule.weights is not None:
        weights = rule.weights  # Eq. 2 over tilted experts is Eq. 2 with weights: their normalisers cancel
    return Hearing(rule, weights, stops)
