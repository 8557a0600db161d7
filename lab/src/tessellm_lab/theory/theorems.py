"""Theorems 1–3, Lemma 1, the length statement and linear merging, as functions that return the largest error.

Each takes a family that satisfies the hypothesis and returns a number that the theorem says is zero. `approximate`
is the version for hypotheses that hold up to ε, with its bounds; the proof is in docs/theory.md.

    M members   K experts   V vocabulary   P a prefix's axes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tessellm.rules import product

from .definitions import coordinates, divergences, projective
from .families import Factorized, Skilled, marginal_on
from .operators import once, stepwise
from .sequences import conditionals, independent, joint, kl_divergence, prefix_laws, total_variation, transport


def theorem_1(family: Factorized) -> float:
    """p̂(x) = p_b(x|M_b) Π_i p_i(x|M_i), projective for x ↦ x|M_i, and Z_t = 1 at every prefix."""
    found = stepwise(family.joints)
    parts = [(block, marginal_on(family.joints[m], block)) for m, block in enumerate(family.blocks) if block]
    claimed = independent(parts, family.joints.ndim - 1)
    labels = coordinates(family.blocks, family.joints.shape[1:])
    gap = projective(found.logp, family.joints, labels).value
    return max(float((found.logp - claimed).abs().max()), found.largest_log_z, gap)


def theorem_2(family: Skilled) -> float:
    """p̂(x_t|x_<t) is the active expert's, or the base's where nobody acts; Z_t = 1."""
    found = stepwise(family.joints)
    return max(float((found.logp - joint(owners_rows(family))).abs().max()), found.largest_log_z)


def owners_rows(family: Skilled, weights_K: Sequence[float] | None = None) -> list[Tensor]:
    """The ideal's conditionals: at every prefix those of its owner, tilted by the owner's weight if it has one."""
    rows_M = [conditionals(logp) for logp in family.joints]
    ideal = []
    for t, owner_P in enumerate(family.owner):
        row_PV = rows_M[0][t]
        for expert in range(1, len(rows_M)):
            weight = 1.0 if weights_K is None else weights_K[expert - 1]
            tilted_PV = product(torch.stack([rows_M[0][t], rows_M[expert][t]]), [weight])
            row_PV = torch.where((owner_P == expert).unsqueeze(-1), tilted_PV, row_PV)
        ideal.append(row_PV)
    return ideal


def lemma_1(joints_M: Tensor, image: Tensor) -> float:
    """C commutes with every invertible D: C[D#p_1, …] = D#C[p_1, …]."""
    moved = torch.stack([transport(logp, image) for logp in joints_M])
    return float((once(moved).logp - transport(once(joints_M).logp, image)).abs().max())


@dataclass(frozen=True)
class FeatureSpace:
    """Theorem 3 in one family: how far C, and Eq. 2, are from projective for x ↦ D(x)|M_i, and Eq. 2 from C."""

    once_gap: float
    stepwise_gap: float
    difference: float


def theorem_3(features: Factorized, image: Tensor, token_sizes: Sequence[int]) -> FeatureSpace:
    """`features` satisfies Definition 1 in feature space; `image` is D⁻¹, from features to sequences of tokens.

    A token may hold several features: `token_sizes` regroups them.
    """
    tokens_M = torch.stack([transport(logp, image) for logp in features.joints]).reshape(-1, *token_sizes)
    labels = [
        torch.empty_like(label.flatten()).scatter(0, image, label.flatten())
        for label in coordinates(features.blocks, features.joints.shape[1:])
    ]
    whole, chained = once(tokens_M).logp, stepwise(tokens_M).logp
    gaps = [projective(logp, tokens_M, [label.reshape(logp.shape) for label in labels]) for logp in (whole, chained)]
    return FeatureSpace(gaps[0].value, gaps[1].value, total_variation(whole, chained))


def length_statement(family: Factorized, right: Sequence[Tensor]) -> float:
    """What each member does right on its own block at this length, the composition does right on all of them.

    `right[m]` marks the good outcomes of block m. Under Definition 1 the composition's probability that all blocks are
    right is the product of the members' own; the error of that is returned.
    """
    logp = stepwise(family.joints).logp
    product_of_members, all_right = 1.0, torch.ones_like(logp, dtype=torch.bool)
    for m, block in enumerate(family.blocks):
        if block:
            product_of_members *= float(marginal_on(family.joints[m], block).exp()[right[m]].sum())
            mask = independent([(block, right[m].double())], logp.ndim) > 0
            all_right = all_right & mask
    return abs(float(logp.exp()[all_right].sum()) - product_of_members)


@dataclass(frozen=True)
class Approximate:
    """What happens where idle experts are only near the base. Each measured number must not exceed its bound."""

    log_z_excess: float  # max over prefixes of |log Z_t| − a_t, for weights 1
    ratio_excess: float  # max of |log p̂ − log ideal| − 2 a_t
    kl: float
    kl_bound: float  # E_p̂ Σ_t min(2 a_t, a_t²/2)
    projective_gap: float  # total variation between p̂ and the ideal
    projective_bound: float  # √(kl_bound / 2), by Pinsker

    @property
    def excess(self) -> float:
        """How much any bound is exceeded; at most zero, up to rounding."""
        kl, gap = self.kl - self.kl_bound, self.projective_gap - self.projective_bound
        return max(self.log_z_excess, self.ratio_excess, kl, gap)


def approximate(family: Skilled, weights_K: Sequence[float] | None = None) -> Approximate:
    """Our version of Theorem 2. At a prefix a_t = Σ over idle experts of |w_i| sup_v |log p_i − log p_b|."""
    weights = [1.0] * (len(family.joints) - 1) if weights_K is None else list(weights_K)
    found = stepwise(family.joints, weights)
    ideal = owners_rows(family, weights)
    budget = idle_budget(family, weights)
    log_z, ratio, bound = -torch.inf, -torch.inf, 0.0
    reached = prefix_laws(found.logp)
    for t, (row_PV, a_P) in enumerate(zip(conditionals(found.logp), budget, strict=True)):
        ratio = max(ratio, float(((row_PV - ideal[t]).abs().amax(-1) - 2 * a_P).max()))
        bound += float((reached[t].exp() * torch.minimum(2 * a_P, a_P.square() / 2)).sum())
        if all(weight == 1 for weight in weights):
            log_z = max(log_z, float((found.log_z[t].abs() - a_P).max()))
    target = joint(ideal)
    gap = total_variation(found.logp, target)
    return Approximate(log_z, ratio, kl_divergence(found.logp, target), bound, gap, (bound / 2) ** 0.5)


def idle_budget(family: Skilled, weights: Sequence[float]) -> list[Tensor]:
    """a_t at every prefix."""
    weight_K = torch.tensor(weights, dtype=torch.float64).abs()
    pairs = zip(divergences(family.joints), family.active, strict=True)
    return [torch.einsum("k...,k->...", sup_KP.masked_fill(mask_KP, 0.0), weight_K) for sup_KP, mask_KP in pairs]


def merge_linear(maps_M: Tensor) -> Tensor:
    """Eq. 5: θ̂ = θ_b + Σ_i (θ_i − θ_b)."""
    return maps_M[0] + (maps_M[1:] - maps_M[0]).sum(0)


def linear_merging(maps_M: Tensor, masks_K: Tensor, inputs_BI: Tensor) -> float:
    """Under Definition 5: merged weights give each expert's output on its coordinates and the base's elsewhere.

    Also that merging weights equals adding output differences, which for linear maps needs no hypothesis.
    """
    outputs_MBO = torch.einsum("moi,bi->mbo", maps_M, inputs_BI)
    merged_BO = inputs_BI @ merge_linear(maps_M).T
    error = float((merged_BO - merge_linear(outputs_MBO)).abs().max())
    for mask_O, output_BO in zip(masks_K, outputs_MBO[1:], strict=True):
        error = max(error, float(((merged_BO - output_BO) * mask_O).abs().max()))
    nobody_O = 1 - masks_K.sum(0)
    return max(error, float(((merged_BO - outputs_MBO[0]) * nobody_O).abs().max()))


def task_arithmetic_violation(outputs_SBV: Tensor, alone_SBV: Tensor) -> float:
    """Weight disentanglement error: mean total variation between the merged network and the one task vector alone.

    Both are log-probabilities on the tasks' own supports, S tasks and B inputs each (Ortiz-Jimenez et al., 2023).
    """
    return 0.5 * float((outputs_SBV.exp() - alone_SBV.exp()).abs().sum(-1).mean())
