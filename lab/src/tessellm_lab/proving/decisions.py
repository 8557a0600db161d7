"""What a router decided, and how much of it is right at a stated base retention. Knows names and numbers alone.

A router chooses one expert for a prompt and scores it; under a threshold the base answers. Routers are compared at one
retention: the threshold is moved until that share of the ordinary test prompts (`plain`) stays with the base.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tessellm.statistics import bootstrap

from .skills import BASE, NO_INSTRUCTION, Asked

RETENTION, CONFIDENCE = 0.95, 0.95
PLAIN = "plain"


@dataclass(frozen=True)
class Decision:
    """The expert that a router chose, its score, and the member that answers at the router's own threshold."""

    chosen: str
    score: float
    selected: str | None = None


def threshold_for(decisions: Sequence[Decision], asked: Sequence[Asked], retention: float = RETENTION) -> float:
    """Return the lowest score under which this share of the ordinary prompts lies."""
    scores = [d.score for d, a in zip(decisions, asked, strict=True) if a.cell == PLAIN]
    return float(np.quantile(np.array(scores), retention, method="higher")) if scores else float("-inf")


def right_at(decision: Decision, asked: Asked, threshold: float) -> bool:
    """Whether the expected member answers, where a score has to be over the threshold."""
    accepted = decision.score > threshold
    return not accepted if asked.expected == BASE else accepted and decision.chosen == asked.expected


def cells(decisions: Sequence[Decision], asked: Sequence[Asked], seed: int = 0) -> dict[str, Any]:
    """Return the share that is right in each cell, at the shifted threshold, at the router's own, and for the experts
    without any."""
    threshold = threshold_for(decisions, asked)
    pairs = list(zip(decisions, asked, strict=True))
    found: dict[str, Any] = {}
    for cell in dict.fromkeys(a.cell for a in asked):
        here = [(d, a) for d, a in pairs if a.cell == cell]
        entry = share([right_at(d, a, threshold) for d, a in here], seed)
        if here[0][0].selected is not None:
            entry["shipped"] = float(np.mean([d.selected == a.expected for d, a in here]))
        if here[0][1].expected != BASE:
            entry["closed"] = float(np.mean([d.chosen == a.expected for d, a in here]))
            told = [right_at(d, a, threshold) for d, a in here if a.expected != NO_INSTRUCTION]
            entry["with instruction"] = float(np.mean(told)) if told else None
            entry["skills"] = by_skill(here, threshold)
        found[cell] = entry
    return {"threshold": threshold, "cells": found}


def by_skill(pairs: Sequence[tuple[Decision, Asked]], threshold: float) -> dict[str, float]:
    """Return the share that is right per skill."""
    skills = dict.fromkeys(a.expected for _, a in pairs)
    return {
        skill: float(np.mean([right_at(d, a, threshold) for d, a in pairs if a.expected == skill])) for skill in skills
    }


def share(right: Sequence[bool | float], seed: int = 0) -> dict[str, Any]:
    """Return a mean with its bootstrap interval over prompts."""
    values = torch.tensor([float(each) for each in right], dtype=torch.float64)
    low, high = bootstrap(values, torch.ones_like(values), CONFIDENCE, seed)
    return {"share": float(values.mean()), "low": low, "high": high, "of": len(values)}


def confusions(decisions: Sequence[Decision], asked: Sequence[Asked], threshold: float) -> dict[str, int]:
    """Return how often a prompt of one member went to another, the commonest first."""
    found: dict[str, int] = {}
    for decision, prompt in zip(decisions, asked, strict=True):
        went = decision.chosen if decision.score > threshold else BASE
        if went != prompt.expected:
            key = f"{prompt.expected} → {went}"
            found[key] = found.get(key, 0) + 1
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def errors(decisions: Sequence[Decision], asked: Sequence[Asked], threshold: float, most: int) -> list[dict[str, str]]:
    """Return prompts that went to the wrong member, for people to judge."""
    wrong = [
        {"prompt": a.text[:200], "expected": a.expected, "went": d.chosen if d.score > threshold else BASE}
        for d, a in zip(decisions, asked, strict=True)
        if not right_at(d, a, threshold)
    ]
    return wrong[:: max(1, len(wrong) // most)][:most]
