"""From kept features to what the library's decision reads: forms of energy, descriptions, examples.

Shapes: P prompts, K experts, F features (last token, user's tokens), M pairs of expert and layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tessellm.routing.calibration import EnergyScale, Scale
from tessellm.routing.decision import Signals
from tessellm.routing.energy import plan_blocks
from tessellm.routing.examples import ExampleClassifier, classifier_input

from .cache import Table

LAST, TOP, MEAN = range(3)  # places of the poolings
SHIPPED = "shipped: last token + largest quarter"


def energy_forms(table: Table, blocks: int) -> dict[str, Tensor]:
    """Return the features of each form of energy, [P, F, K]."""
    block_M = torch.tensor([block or 0 for _, block in table.pairs])
    plan, half = plan_blocks(blocks, 1), plan_blocks(blocks, 10**6)
    calibration_P = table.is_part("calibration")
    spread_M = 1 / table.last()[calibration_P].std(0).clamp_min(1e-6)
    planned_M, halved_M = (torch.isin(block_M, torch.tensor(each)).float() for each in (plan, half))
    weights = [planned_M, torch.ones(len(block_M)), halved_M, planned_M * spread_M]
    shipped, every, halved, spread = table.pooled(weights)
    length_P = table.length_P.clamp_min(1).float().log()
    return {
        SHIPPED: shipped[:, [LAST, TOP]],
        "last token alone": shipped[:, [LAST]],
        "largest quarter alone": shipped[:, [TOP]],
        "last token + mean of the user's tokens": shipped[:, [LAST, MEAN]],
        "logarithms": shipped[:, [LAST, TOP]].log(),
        "without what the log length explains": _without(shipped[:, [LAST, TOP]], length_P, calibration_P),
        "all blocks": every[:, [LAST, TOP]],
        "every second block": halved[:, [LAST, TOP]],
        "layers over their spread on calibration prompts": spread[:, [LAST, TOP]],
    }


def _without(features_PFK: Tensor, length_P: Tensor, fitted_P: Tensor) -> Tensor:
    basis_P2 = torch.stack([torch.ones_like(length_P), length_P], 1)
    flat_PX = features_PFK.flatten(1)
    solution = torch.linalg.lstsq(basis_P2[fitted_P], flat_PX[fitted_P]).solution
    return (flat_PX - basis_P2 @ solution).view_as(features_PFK)


class SignalMaker:
    """Signals of all prompts, for a set of experts and embedders."""

    def __init__(self, table: Table, features_PFK: Tensor, embedders: Sequence[str], experts: Sequence[int]):
        self.table, self.embedders, self.experts = table, embedders, list(experts)
        self.features_PFK = features_PFK[..., self.experts]
        self.calibration_P = table.is_part("calibration")
        self.scale = EnergyScale.of(self.features_PFK[self.calibration_P])
        self.energy_PK = self.scale.z(self.features_PFK)

    def nothing(self) -> Signals:
        none_PK = torch.zeros_like(self.energy_PK)
        texts = none_PK[..., None].repeat(1, 1, len(self.embedders))
        return Signals(self.energy_PK, texts, none_PK, torch.zeros(len(self.experts), dtype=torch.bool))

    def described(self, kind: str = "sentence", given: Sequence[int] | None = None) -> Signals:
        """Signals with descriptions. `given` names per expert whose description it has, −1 for none."""
        own = torch.tensor(self.experts if given is None else given)
        found = [
            (self.table.vectors[key] @ self.table.descriptions[key, kind][own].T) * (own >= 0) for key in self.embedders
        ]
        similarity_PKS = torch.stack(found, -1)
        text_PKS = Scale.of(similarity_PKS[self.calibration_P]).z(similarity_PKS)
        return Signals(self.energy_PK, text_PKS, torch.zeros_like(self.energy_PK), own >= 0)

    def with_examples(self, signals: Signals, count: int, seed: int) -> Signals:
        """Add the odds by so many prompts of dev per expert."""
        generator = torch.Generator().manual_seed(seed)
        rows, owners = [], []
        for place, expert in enumerate(self.experts):
            mine = (self.table.is_part("dev") & (self.table.label_P == expert)).nonzero()[:, 0]
            picked = mine[torch.randperm(len(mine), generator=generator)[:count]]
            rows.append(picked)
            owners.append(torch.full((len(picked),), place))
        vectors = [self.table.vectors[key] for key in self.embedders]
        x_PD = classifier_input(self.scale.features.z(self.features_PFK), vectors)
        calibration_ND, owner_N = x_PD[self.calibration_P], torch.cat(owners)
        classifier = ExampleClassifier.fit(calibration_ND, x_PD[torch.cat(rows)], owner_N, len(self.experts))
        odds_PK = classifier.odds(x_PD)
        odds_PK[self.calibration_P] = classifier.odds_PK
        none_K = torch.zeros_like(signals.described_K)
        return Signals(signals.energy_BK, signals.text_BKS, odds_PK, none_K)
