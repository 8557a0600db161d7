"""How well scores route: at 95 % of plain.test left to the base, the mean over skills of the share routed right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tessellm.routing.decision import DecisionWeights, Signals, Thresholds, accepted_by, scores, threshold

from .cache import Table

RETENTION, DRAWS = 0.95, 1000


@dataclass(frozen=True)
class Outcome:
    """What a router does on all prompts, as shares: of seeds, where examples were drawn."""

    right_P: Tensor  # the right member was selected, the threshold shifted to 95 % of plain.test
    shipped_P: Tensor  # the base was selected at the threshold that calibration prompts alone give


def route(table: Table, signals: Signals, weights: DecisionWeights, experts: Sequence[int]) -> Outcome:
    """Route all prompts among these experts."""
    calibration_P, plain_P = table.is_part("calibration"), table.is_part("plain.test")
    limits = Thresholds.of(_rows(signals, calibration_P), weights, RETENTION)
    choose_PK, accept_PK = scores(signals, weights, limits.floor)
    accepted_P, chosen_P = accepted_by(choose_PK, accept_PK), torch.tensor(experts)[choose_PK.argmax(-1)]
    shifted = threshold(choose_PK[plain_P], accept_PK[plain_P], RETENTION)
    kept_P = accepted_P <= shifted
    right_P = torch.where(table.label_P < 0, kept_P, ~kept_P & (chosen_P == table.label_P))
    return Outcome(right_P.float(), (accepted_P <= limits.threshold).float())


def _rows(signals: Signals, wanted_P: Tensor) -> Signals:
    energy_PK, text_PKS, odds_PK = signals.energy_BK[wanted_P], signals.text_BKS[wanted_P], signals.odds_BK[wanted_P]
    return Signals(energy_PK, text_PKS, odds_PK, signals.described_K)


def averaged(outcomes: Sequence[Outcome]) -> Outcome:
    right = torch.stack([each.right_P for each in outcomes]).mean(0)
    return Outcome(right, torch.stack([each.shipped_P for each in outcomes]).mean(0))


def cells(table: Table, right_P: Tensor, part: str, skills: Sequence[int]) -> list[np.ndarray]:
    """Return the prompts' shares by skill; −1 is the base."""
    is_part_P = table.is_part(part)
    return [right_P[is_part_P & (table.label_P == skill)].numpy() for skill in skills]


def share(groups: Sequence[np.ndarray], seed: int = 0) -> dict[str, float]:
    """Return the mean of the groups' means, and its 95 % bootstrap interval: prompts drawn anew within each group."""
    generator = np.random.default_rng(seed)
    draws = [group[generator.integers(len(group), size=(DRAWS, len(group)))].mean(1) for group in groups]
    low, high = np.quantile(np.mean(draws, 0), (0.025, 0.975))
    mean = float(np.mean([group.mean() for group in groups]))
    return {"share": round(mean, 4), "low": round(float(low), 4), "high": round(float(high), 4)}


def summary(table: Table, outcome: Outcome, skills: Sequence[int]) -> dict[str, dict[str, float]]:
    """Return what is reported of a router."""
    found = {part: share(cells(table, outcome.right_P, part, skills)) for part in ("seen", "unseen")}
    found["near"] = share(cells(table, outcome.right_P, "near.test", [-1]))
    for part in ("plain.test", "plain.dev"):
        found[f"{part} kept as shipped"] = share(cells(table, outcome.shipped_P, part, [-1]))
    return found
