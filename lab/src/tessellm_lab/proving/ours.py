"""The library's router as a column: routes of prompts that were read once."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tessellm.routing.route import BASE as ROUTED_TO_BASE
from tessellm.routing.route import Route, Router

from .decisions import Decision
from .reading import Reading

AT_ONCE = 64  # prompts: their energies are in memory


def decide(router: Router, readings: Sequence[Reading], experts: Sequence[int]) -> list[Decision]:
    """Return what a router of these experts, given by their places, says of each prompt."""
    return [decision_of(route) for route in routes(router, readings, experts)]


def routes(router: Router, readings: Sequence[Reading], experts: Sequence[int]) -> list[Route]:
    """Return the routes of prompts that were read."""
    found: list[Route] = []
    for start in range(0, len(readings), AT_ONCE):
        found += router.route([reading.routed(experts) for reading in readings[start : start + AT_ONCE]])
    return found


def decision_of(route: Route) -> Decision:
    """Return the likeliest expert with its score, and the member that is selected."""
    experts = {name: share for name, share in route.prior.items() if name != ROUTED_TO_BASE}
    chosen = max(experts, key=lambda name: experts[name])
    score = route.scores[chosen]
    return Decision(chosen, -math.inf if score is None else score, route.selected)
