"""Examples: a logistic regression over the base and the experts that have some, fitted once per composition.

It reads the energies of a prompt under all experts and its text vectors. Its log odds against the base join the scores.
Knows no model and no text.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PENALTY = 1e-4  # on squared weights
ENERGY_SCALE, VECTOR_SCALE = 1 / 3, 2.0  # so that z-scores and unit vectors are penalised alike
BASE_WEIGHT = 3.0  # of all calibration prompts together; all examples together have 1
FOLDS, STEPS = 2, 40


@dataclass(frozen=True)
class ExampleClassifier:
    """Weights of the base and K experts; experts without examples have odds of 0, which says nothing."""

    weight_DC: Tensor
    bias_C: Tensor
    known_K: Tensor
    odds_PK: Tensor  # on the calibration prompts, each by a fit that did not see it: for the threshold

    @classmethod
    def fit(cls, prompts_PD: Tensor, examples_ND: Tensor, expert_N: Tensor, experts: int) -> ExampleClassifier:
        """Fit on calibration prompts, which are the base's, and examples of experts."""
        known_K = torch.zeros(experts, dtype=torch.bool).index_fill_(0, expert_N, True)
        fold_P = torch.arange(len(prompts_PD)) % FOLDS
        odds_PK = torch.zeros(len(prompts_PD), experts)
        for fold in range(FOLDS):
            others = _fit(prompts_PD[fold_P != fold], examples_ND, expert_N, experts)
            odds_PK[fold_P == fold] = _odds(prompts_PD[fold_P == fold], *others, known_K)
        return cls(*_fit(prompts_PD, examples_ND, expert_N, experts), known_K, odds_PK)

    def odds(self, prompts_BD: Tensor) -> Tensor:
        """Return the log odds of each expert against the base, [B, K]."""
        return _odds(prompts_BD, self.weight_DC, self.bias_C, self.known_K)


def classifier_input(energy_BFK: Tensor, vectors: list[Tensor]) -> Tensor:
    """Return what the regression reads: the z-scores of the energies' features, and text vectors, [B, D]."""
    return torch.cat([energy_BFK.flatten(1) * ENERGY_SCALE, *(each * VECTOR_SCALE for each in vectors)], 1)


def _odds(x_BD: Tensor, weight_DC: Tensor, bias_C: Tensor, known_K: Tensor) -> Tensor:
    logit_BC = x_BD @ weight_DC + bias_C
    return (logit_BC[:, 1:] - logit_BC[:, :1]) * known_K


@torch.enable_grad()
def _fit(prompts_PD: Tensor, examples_ND: Tensor, expert_N: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    x_ND = torch.cat([prompts_PD, examples_ND]).detach()
    label_N = torch.cat([torch.zeros(len(prompts_PD), dtype=torch.long), expert_N + 1])
    share_N = torch.where(label_N == 0, BASE_WEIGHT / len(prompts_PD), 1 / len(examples_ND)) / (1 + BASE_WEIGHT)
    weight_DC = torch.zeros(x_ND.shape[1], experts + 1, requires_grad=True)
    bias_C = torch.zeros(experts + 1, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight_DC, bias_C], max_iter=STEPS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        nll_N = torch.nn.functional.cross_entropy(x_ND @ weight_DC + bias_C, label_N, reduction="none")
        total = (nll_N * share_N).sum() + PENALTY * weight_DC.square().sum()
        total.backward()
        return total

    optimizer.step(loss)
    return weight_DC.detach(), bias_C.detach()
