"""Who answers a request: the members that run, and what the router said of its prompt. Knows requests of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..engine.requests import Request

MIXED = "mixed"  # the answer of several members where no router selected one
SHOWN = 8  # members of a prior
LEAST = 0.0005  # the smallest share of a prior that is shown

Shares = dict[str, float | None]  # of the members that answer; None: nobody routed the prompt


def active_shares(names: Sequence[str], request: Request) -> Shares:
    """Return who answers, with the prior's shares among them; of a prompt that nobody routed, those that run."""
    if request.components is None:
        return {}
    active = [names[number] for number in request.components.answering]
    if request.route is None:
        return dict.fromkeys(active)
    prior = request.route.prior
    total = sum(prior.get(name, 0.0) for name in active) or 1.0
    return {name: prior.get(name, 0.0) / total for name in sorted(active, key=lambda name: -prior.get(name, 0.0))}


def answered_by(names: Sequence[str], request: Request) -> str | None:
    """Return the member that the router selected or the request named, `mixed` for several; None: not known yet."""
    if request.route is not None:
        return request.route.selected
    if request.components is None:
        return None
    members = request.components.answering
    return names[members[0]] if len(members) == 1 else MIXED


def routing_of(names: Sequence[str], request: Request) -> dict[str, Any] | None:
    """Return who answers and why, as JSON holds it; None: not known yet."""
    selected = answered_by(names, request)
    if selected is None:
        return None
    told: dict[str, Any] = {"selected": selected, "active": list(active_shares(names, request))}
    if request.route is not None:
        ranked = sorted(request.route.prior.items(), key=lambda item: -item[1])[:SHOWN]
        told["prior"] = {name: round(share, 4) for name, share in ranked if share >= LEAST}
        score = request.route.scores.get(selected)
        told |= {"threshold": round(request.route.threshold, 4), "score": None if score is None else round(score, 4)}
    return told
