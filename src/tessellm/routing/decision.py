"""From z-scores to a prior: choose an expert by energy and text, accept it by energy and less text, with a floor on the
energy. The weights are the same for every expert; they were fitted on other skills' experts and ship with the library.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files

import torch
from torch import Tensor

REJECTED = 8.0  # how far below the threshold an expert under the floor counts, on the scale of logits


@dataclass(frozen=True)
class DecisionWeights:
    """How signals count beside the energy, whose weight is 1."""

    floor: float  # the share of calibration prompts whose largest energy is under the floor
    scale: float  # from scores to logits
    examples: float  # of the log odds by examples
    margin: float  # with examples, the share of 1 − base_retention that the threshold makes use of
    choose: Tensor  # of the similarity to the description, per embedder
    accept: Tensor

    @classmethod
    def shipped(cls, embedders: Iterable[str]) -> DecisionWeights:
        """Return the library's weights for the signals of these embedders."""
        raw = json.loads((files(__package__) / "weights.json").read_text(encoding="utf-8"))["+".join(embedders)]
        choose, accept = torch.tensor(raw["choose"]), torch.tensor(raw["accept"])
        return cls(raw["floor"], raw["scale"], raw["examples"], raw["margin"], choose, accept)


@dataclass(frozen=True)
class Signals:
    """What is known of prompts, for every expert."""

    energy_BK: Tensor
    text_BKS: Tensor  # similarity to the description, per embedder; 0 where there is none
    odds_BK: Tensor  # by examples; 0 where there are none
    described_K: Tensor  # which experts have a description and no examples


@dataclass(frozen=True)
class Thresholds:
    """What calibration prompts set for all others."""

    floor: float  # of the energy, for experts that have a description alone
    threshold: float

    @classmethod
    def of(cls, signals: Signals, weights: DecisionWeights, base_retention: float) -> Thresholds:
        """Set the limits by the signals of calibration prompts. A classifier knows these better than other ordinary
        prompts, even if it did not see them: hence the margin."""
        floor = float(signals.energy_BK.amax(-1).quantile(weights.floor))
        used = weights.margin if signals.odds_BK.any() else 1.0
        return cls(floor, threshold(*scores(signals, weights, floor), 1 - used * (1 - base_retention)))


def scores(signals: Signals, weights: DecisionWeights, floor: float) -> tuple[Tensor, Tensor]:
    """Return for every expert what it is chosen by and what it is accepted by, both [B, K]. −inf where the energy is
    under the floor, and where a value is not a number."""
    energy_BK, odds_BK = signals.energy_BK, signals.odds_BK * weights.examples
    choose_BK = energy_BK + odds_BK + signals.text_BKS @ weights.choose
    accept_BK = energy_BK + odds_BK + signals.text_BKS @ weights.accept
    accept_BK = accept_BK.masked_fill(signals.described_K & (energy_BK < floor), -torch.inf)
    broken_BK = ~(choose_BK.isfinite() & energy_BK.isfinite())
    return choose_BK.masked_fill(broken_BK, -torch.inf), accept_BK.masked_fill(broken_BK, -torch.inf)


def accepted_by(choose_BK: Tensor, accept_BK: Tensor) -> Tensor:
    """Return the score of the chosen expert, [B]: what is compared with the threshold."""
    return accept_BK.gather(-1, choose_BK.argmax(-1, keepdim=True))[:, 0]


def threshold(choose_BK: Tensor, accept_BK: Tensor, base_retention: float) -> float:
    """Return the score below which this share of prompts stays with the base."""
    found = accepted_by(choose_BK, accept_BK)
    finite = found[found.isfinite()]
    if not len(finite):
        return 0.0
    value = float(found.clamp_min(float(finite.min()) - 1).quantile(base_retention))
    return max(value, float(finite.min()))


def prior(choose_BK: Tensor, accept_BK: Tensor, threshold: float, weights: DecisionWeights) -> Tensor:
    """Return the prior over the base and the experts, [B, 1 + K]. The base holds half at the threshold."""
    margin_B = (accepted_by(choose_BK, accept_BK) - threshold) * weights.scale
    expert_B1 = margin_B.clamp_min(-REJECTED).sigmoid()[:, None]
    broken_B1 = (choose_BK == -torch.inf).all(-1, keepdim=True)
    among_BK = (choose_BK * weights.scale).masked_fill(broken_B1, 0.0).softmax(-1)
    expert_B1 = expert_B1.masked_fill(broken_B1, 0.0)
    return torch.cat([1 - expert_B1, expert_B1 * among_BK], -1)
