"""The one part of a trace that reads whole rows of log-probabilities: [members, rows, vocabulary] to a few numbers.

On a CPU some rows at a time, so that what is read again and again stays in a core's cache; on other devices all at
once. Nothing waits for the host.

Shapes: M members (0 is the base), K experts, R rows, V vocabulary, N: members, then composed, C likeliest.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..rules import ComposedRule, Product
from ..rules.equation import IMPOSSIBLE, LOG_FLOOR

TOP = 5
TINY = 1e-38  # p log p is 0 where p is
RAISED = 0.05  # nats: less is noise
STEEPEST = 1e34  # larger ratios of probabilities overflow; so steep a one is far beyond any threshold
BLOCK = 1 << 18  # log-probabilities that are read at a time on a CPU
GROUP = 128  # neighbours whose largest is looked at first


class Swept(NamedTuple):
    """Of every row; what the names mean is said in row_statistics.py."""

    divergence_RK: Tensor
    epsilon_RK: Tensor
    log_z_R: Tensor
    pair_log_z_RKK: Tensor
    pair_accord_RKK: Tensor
    away_RM: Tensor  # KL(p̂ ‖ p_m)
    gap_R: Tensor
    clash_R: Tensor
    entropy_RN: Tensor
    top_ids_RNC: Tensor
    top_logprobs_RNC: Tensor


def sweep(logp_MRV: Tensor, composed_RV: Tensor, rule: ComposedRule) -> Swept:
    members, rows, vocabulary = logp_MRV.shape
    size = max(1, BLOCK // (members * vocabulary))
    if logp_MRV.device.type != "cpu" or rows <= size:
        return block(logp_MRV, composed_RV, rule)
    parts = zip(logp_MRV.split(size, 1), composed_RV.split(size), strict=True)
    found = [block(logp, composed, rule) for logp, composed in parts]
    return Swept._make(torch.cat(each) for each in zip(*found, strict=True))


def block(logp_MRV: Tensor, composed_RV: Tensor, rule: ComposedRule) -> Swept:
    tilted_MRV = rule.weighted_members(logp_MRV)
    safe_MRV, prob_MRV, composed_prob_RV = tilted_MRV.clamp_min(LOG_FLOOR), tilted_MRV.exp(), composed_RV.exp()
    ratio_KRV = safe_MRV[1:] - safe_MRV[0]
    entropy_MR = -torch.linalg.vecdot(prob_MRV, safe_MRV)
    composed_entropy_R = -torch.linalg.vecdot(composed_prob_RV, composed_RV.clamp_min(LOG_FLOOR))
    epsilon_KR = torch.maximum(ratio_KRV.amax(-1), -ratio_KRV.amin(-1))
    score_RV = safe_MRV[0] + ratio_KRV.sum(0)
    most_R1 = score_RV.amax(-1, keepdim=True)
    product_RV = score_RV.sub_(most_R1).exp_()  # Eq. 2, but for its sum
    total_R1 = product_RV.sum(-1, keepdim=True)
    top_MRC, member_ids_MRC = likeliest(logp_MRV)
    top_RC, ids_RC = likeliest(composed_RV)
    plain = rule.weights_but_ones is None
    favourite_KR1 = (member_ids_MRC[1:] if plain else likeliest(tilted_MRV[1:])[1])[..., :1]
    pair_log_z_RKK, pair_accord_RKK = pairs(prob_MRV, ratio_KRV, favourite_KR1)

    away_RM = (-composed_entropy_R - torch.einsum("rv,mrv->mr", composed_prob_RV, safe_MRV)).clamp_min_(0).T
    clash_R = gap_R = distance_to(away_RM.argmin(-1), composed_prob_RV, prob_MRV)
    if rule.name != Product.name:
        product_RV.div_(total_R1)
        nearest_R = torch.einsum("rv,mrv->rm", product_RV, safe_MRV).argmax(-1)
        clash_R = distance_to(nearest_R, product_RV, prob_MRV)
    return Swept(
        divergence_RK=torch.linalg.vecdot(prob_MRV[1:], ratio_KRV).clamp_min_(0).T,
        epsilon_RK=epsilon_KR.masked_fill_(epsilon_KR > -IMPOSSIBLE, torch.inf).T,
        log_z_R=(most_R1 + total_R1.log())[:, 0],
        pair_log_z_RKK=pair_log_z_RKK,
        pair_accord_RKK=pair_accord_RKK,
        away_RM=away_RM,
        gap_R=gap_R,
        clash_R=clash_R,
        entropy_RN=torch.cat([entropy_MR, composed_entropy_R[None]]).T,
        top_ids_RNC=torch.cat([member_ids_MRC, ids_RC[None]]).transpose(0, 1),
        top_logprobs_RNC=torch.cat([top_MRC, top_RC[None]]).transpose(0, 1),
    )


def half_distance(p: Tensor, q: Tensor) -> Tensor:
    """Total variation."""
    return (p - q).abs_().sum(-1) / 2


def distance_to(member_R: Tensor, prob_RV: Tensor, prob_MRV: Tensor) -> Tensor:
    rows = len(member_R)
    at_R = member_R * rows + torch.arange(rows, device=member_R.device)
    return half_distance(prob_RV, prob_MRV.flatten(0, 1).index_select(0, at_R))


def likeliest(logp: Tensor) -> tuple[Tensor, Tensor]:
    """The TOP largest of the last axis and where they are. They stand in the TOP groups with the largest heads, so on a
    CPU, which sorts slowly, few numbers need to be sorted."""
    size, count = logp.shape[-1], min(TOP, logp.shape[-1])
    groups = size // GROUP
    if logp.device.type != "cpu" or groups <= 2 * TOP:
        return logp.topk(count, -1)
    whole = logp[..., : groups * GROUP].unflatten(-1, (groups, GROUP))
    group_G = whole.amax(-1).topk(TOP, -1).indices
    chosen = whole.gather(-2, group_G[..., None].expand(*group_G.shape, GROUP)).flatten(-2)
    place = (group_G[..., None] * GROUP + torch.arange(GROUP)).flatten(-2)
    rest = torch.arange(groups * GROUP, size).expand(*place.shape[:-1], -1)
    top, at = torch.cat([chosen, logp[..., groups * GROUP :]], -1).topk(count, -1)
    return top, torch.cat([place, rest], -1).gather(-1, at)


def pairs(prob_MRV: Tensor, ratio_KRV: Tensor, favourite_KR1: Tensor) -> tuple[Tensor, Tensor]:
    """log Z of Eq. 2 over any two experts, and their accord: the share of its mass on tokens that both want. An expert
    wants a token if it raises it at least half as much as its favourite (in log-probability)."""
    factor_KRV = (prob_MRV[1:] / prob_MRV[0].clamp_min(TINY)).clamp_max_(STEEPEST)
    least_KR1 = (ratio_KRV.gather(-1, favourite_KR1) / 2).clamp_min(RAISED)
    wanted_KRV = torch.ge(ratio_KRV, least_KR1, out=torch.empty_like(ratio_KRV))  # 0 or 1
    z_RKK = torch.einsum("krv,lrv->rkl", prob_MRV[1:], factor_KRV)
    both_RKK = torch.einsum("krv,lrv->rkl", prob_MRV[1:] * wanted_KRV, factor_KRV.mul_(wanted_KRV))
    itself_KK = torch.eye(len(ratio_KRV), dtype=torch.bool, device=z_RKK.device)
    return z_RKK.log().masked_fill_(itself_KK, 0.0), (both_RKK / z_RKK).masked_fill_(itself_KK, 1.0)
