"""What is worth knowing of a row of log-probabilities, in one pass on the device: numbers, never distributions.

Pure functions of tensors; nothing waits for the host. Divergences are between laws as the rule hears them (laws.py).

Shapes: M members (0 is the base), K experts, B batch, T time, V vocabulary, N voices: members, then composed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import gates
from ..evidence import CLAIM, Evidence, Trace
from ..gates import IMPOSSIBLE, LOG_ZERO
from ..rules import Product
from ..termination import ends_of, log_left
from .laws import Hearing

TOP = 5
ACTIVE = 0.1  # an expert is active where it diverges from the base by more than this (nats)
TINY = 1e-38  # p log p is 0 where p is
RAISED = 0.05  # nats: less is noise
STEEPEST = 1e34  # larger ratios of probabilities overflow; so steep a one is far beyond any threshold


class Statistics(NamedTuple):
    """One row a position; the row at t is about the law of the next token."""

    owner_BT: Tensor  # the member whose law the composed one is nearest to; the base if it is within ACTIVE of that
    divergence_BTK: Tensor  # KL(p_i ‖ p_b), nats
    jensen_shannon_BTK: Tensor  # nats
    total_variation_BTK: Tensor
    epsilon_BTK: Tensor  # sup_v |log p_i − log p_b|
    log_z_BT: Tensor  # of Eq. 2 over all experts: zero where the theory holds
    pair_log_z_BTKK: Tensor  # of Eq. 2 over two experts; zero on the diagonal
    pair_accord_BTKK: Tensor  # how much of Eq. 2 over two experts is what both of them want; one on the diagonal
    clash_BT: Tensor  # total variation between Eq. 2 over all experts and the nearest member, whatever the rule
    idle_BT: Tensor  # a_t: the sum of ε over the experts that should be idle
    bound_BT: Tensor  # on KL(p̂ ‖ nearest member), by the approximate theorem
    gap_BT: Tensor  # total variation between the composed law and the nearest member's
    gap_kl_BT: Tensor  # KL(p̂ ‖ nearest member)
    novel_BT: Tensor  # the composed favourite is nobody's
    entropy_BTN: Tensor
    top_ids_BTNC: Tensor
    top_logprobs_BTNC: Tensor
    hazard_BTN: Tensor  # probability of stopping now
    evidence_BTM: Tensor | None = None  # these where the rule weighs evidence
    trusted_BTM: Tensor | None = None
    interference_BT: Tensor | None = None
    blended_BT: Tensor | None = None


def statistics(
    logp_MBTV: Tensor, composed_BTV: Tensor, hearing: Hearing, ends: tuple[tuple[int, ...], ...], why: Trace | None
) -> Statistics:
    """`ends`: every member's end tokens; `why`: what the rule says of itself."""
    law_MBTV, spoken_BTV = hearing.members(logp_MBTV), hearing.composed(composed_BTV)
    safe_MBTV, said_BTV = law_MBTV.clamp_min(LOG_ZERO), spoken_BTV.clamp_min(LOG_ZERO)
    prob_MBTV, voice_BTV = law_MBTV.exp(), spoken_BTV.exp()
    ratio_KBTV = safe_MBTV[1:] - safe_MBTV[0]
    entropy_MBT = -torch.einsum("mbtv,mbtv->mbt", prob_MBTV, safe_MBTV)
    spoken_entropy_BT = -torch.einsum("btv,btv->bt", voice_BTV, said_BTV)
    kl_KBT = torch.einsum("kbtv,kbtv->kbt", prob_MBTV[1:], ratio_KBTV).clamp_min(0)
    epsilon_KBT = torch.maximum(ratio_KBTV.amax(-1), -ratio_KBTV.amin(-1))
    epsilon_KBT = epsilon_KBT.masked_fill(epsilon_KBT > -IMPOSSIBLE, torch.inf)
    score_BTV = safe_MBTV[0] + ratio_KBTV.sum(0)
    log_z_BT = score_BTV.logsumexp(-1)
    pair_log_z_BTKK, pair_accord_BTKK = pairs(prob_MBTV, ratio_KBTV)

    away_MBT = (-spoken_entropy_BT - torch.einsum("btv,mbtv->mbt", voice_BTV, safe_MBTV)).clamp_min(0)
    gap_kl_BT, nearest_BT = away_MBT.min(0)
    owner_BT = torch.where(away_MBT[0] <= gap_kl_BT + ACTIVE, 0, nearest_BT)
    clash_BT = gap_BT = distance_to(nearest_BT, voice_BTV, prob_MBTV)
    if hearing.stops is not None or not isinstance(hearing.rule, Product):
        product_BTV = score_BTV.sub_(log_z_BT[..., None]).exp_()
        favoured_BT = torch.einsum("btv,mbtv->mbt", product_BTV, safe_MBTV).argmax(0)  # the nearest to Eq. 2
        clash_BT = distance_to(favoured_BT, product_BTV, prob_MBTV)
    ideal_BT, idle_BT = idle_budget(hearing, kl_KBT, epsilon_KBT, why)
    top_MBTC, member_ids_MBTC = logp_MBTV.topk(min(TOP, logp_MBTV.shape[-1]), -1)
    top_BTC, ids_BTC = composed_BTV.topk(top_MBTC.shape[-1], -1)
    return Statistics(
        owner_BT=owner_BT,
        divergence_BTK=kl_KBT.permute(1, 2, 0),
        jensen_shannon_BTK=jensen_shannon(prob_MBTV, entropy_MBT).permute(1, 2, 0),
        total_variation_BTK=half_distance(prob_MBTV[1:], prob_MBTV[0]).permute(1, 2, 0),
        epsilon_BTK=epsilon_KBT.permute(1, 2, 0),
        log_z_BT=log_z_BT,
        pair_log_z_BTKK=pair_log_z_BTKK,
        pair_accord_BTKK=pair_accord_BTKK,
        clash_BT=clash_BT,
        idle_BT=idle_BT,
        bound_BT=gap_bound(idle_BT, hearing.event(law_MBTV), hearing.event(spoken_BTV), ideal_BT),
        gap_BT=gap_BT,
        gap_kl_BT=gap_kl_BT,
        novel_BT=(member_ids_MBTC[..., 0] != ids_BTC[..., 0]).all(0),
        entropy_BTN=voices(entropy_MBT, spoken_entropy_BT),
        top_ids_BTNC=torch.cat([member_ids_MBTC, ids_BTC[None]]).permute(1, 2, 0, 3),
        top_logprobs_BTNC=torch.cat([top_MBTC, top_BTC[None]]).permute(1, 2, 0, 3),
        hazard_BTN=hazards(logp_MBTV, composed_BTV, ends),
        **({} if why is None else of_evidence(hearing, why)),
    )


def half_distance(p: Tensor, q: Tensor) -> Tensor:
    """Total variation."""
    return (p - q).abs_().sum(-1) / 2


def distance_to(member_BT: Tensor, prob_BTV: Tensor, prob_MBTV: Tensor) -> Tensor:
    at_BTV = member_BT[None, ..., None].expand(1, *prob_BTV.shape)
    return half_distance(prob_BTV, prob_MBTV.gather(0, at_BTV)[0])


def pairs(prob_MBTV: Tensor, ratio_KBTV: Tensor) -> tuple[Tensor, Tensor]:
    """log Z of Eq. 2 over any two experts, and their accord: the share of its mass on tokens that both want. An expert
    wants a token if it raises it at least half as much as its favourite (in log-probability)."""
    factor_KBTV = (prob_MBTV[1:] / prob_MBTV[0].clamp_min(TINY)).clamp_max_(STEEPEST)
    favourite_KBT1 = prob_MBTV[1:].argmax(-1, keepdim=True)
    wanted_KBTV = ratio_KBTV >= (ratio_KBTV.gather(-1, favourite_KBT1) / 2).clamp_min(RAISED)
    z_BTKK = torch.einsum("kbtv,lbtv->btkl", prob_MBTV[1:], factor_KBTV)
    both_BTKK = torch.einsum("kbtv,lbtv->btkl", prob_MBTV[1:] * wanted_KBTV, factor_KBTV.mul_(wanted_KBTV))
    itself_KK = torch.eye(len(ratio_KBTV), dtype=torch.bool, device=z_BTKK.device)
    return z_BTKK.log().masked_fill(itself_KK, 0.0), (both_BTKK / z_BTKK).masked_fill(itself_KK, 1.0)


def voices(members_MBT: Tensor, composed_BT: Tensor) -> Tensor:
    return torch.cat([members_MBT, composed_BT[None]]).permute(1, 2, 0)


def jensen_shannon(prob_MBTV: Tensor, entropy_MBT: Tensor) -> Tensor:
    """Every expert's from the base: the entropy of the mean, less the mean of the entropies."""
    mean_KBTV = (prob_MBTV[1:] + prob_MBTV[0]) / 2
    mixed_KBT = -torch.einsum("kbtv,kbtv->kbt", mean_KBTV, mean_KBTV.clamp_min(TINY).log_())
    return (mixed_KBT - (entropy_MBT[1:] + entropy_MBT[0]) / 2).clamp_min(0)


def hazards(logp_MBTV: Tensor, composed_BTV: Tensor, stops: tuple[tuple[int, ...], ...]) -> Tensor:
    """Each member's probability of its own end tokens, and the composition's of any."""
    if not any(stops):
        members, batch, steps, _ = logp_MBTV.shape
        return logp_MBTV.new_zeros(batch, steps, members + 1)
    ends = ends_of(stops, logp_MBTV.device)
    own_MBTE = logp_MBTV.index_select(-1, ends.token_E).exp() * ends.own_ME[:, None, None]
    return voices(own_MBTE.sum(-1), composed_BTV.index_select(-1, ends.token_E).exp().sum(-1))


def of_evidence(hearing: Hearing, why: Trace) -> dict[str, Tensor]:
    evidence_BTM = why.evidence_BTM
    best_BT1 = evidence_BTM[..., 1:].amax(-1, keepdim=True)
    return {
        "evidence_BTM": evidence_BTM,
        "trusted_BTM": evidence_BTM >= best_BT1 - hearing.rule.trust,
        "interference_BT": why.interference_BT,
        "blended_BT": why.blended_BT,
    }


def idle_budget(hearing: Hearing, kl_KBT: Tensor, epsilon_KBT: Tensor, why: Trace | None) -> tuple[Tensor, Tensor]:
    """The member whose law would be ideal, and a_t: how much ε all others that were heard bring in. By the approximate
    theorem for Eq. 2; a gate hears less of everyone but the most divergent expert; where one owner speaks it is zero.
    Of a rule that is not ours nothing is known: infinity."""
    experts = torch.arange(1, len(kl_KBT) + 1, device=kl_KBT.device)[:, None, None]
    if isinstance(hearing.rule, Evidence) and why is not None:
        about_KBT = why.divergence_BTM.permute(2, 0, 1)[1:]
        loudest_BT = about_KBT.argmax(0) + 1
        epsilon_MBT = torch.cat([torch.zeros_like(epsilon_KBT[:1]), epsilon_KBT])
        centre_BT = epsilon_MBT.gather(0, why.centre_BT[None])[0]  # ratios to it, by way of the base
        others_KBT = (about_KBT > CLAIM) & (experts != loudest_BT)
        idle_BT = torch.where(others_KBT, epsilon_KBT + centre_BT, 0.0).sum(0)
        return torch.where(why.blended_BT, loudest_BT, why.owner_BT), torch.where(why.blended_BT, idle_BT, 0.0)
    loudest_BT = (epsilon_KBT if isinstance(hearing.rule, Product) else kl_KBT).argmax(0) + 1
    if isinstance(hearing.rule, gates.Owner):
        return loudest_BT, torch.zeros_like(kl_KBT[0])
    if isinstance(hearing.rule, Product | gates.Gate):
        return loudest_BT, torch.where(experts == loudest_BT, 0.0, epsilon_KBT).sum(0)
    return loudest_BT, torch.full_like(kl_KBT[0], torch.inf)


def gap_bound(idle_BT: Tensor, event_MBT: Tensor | None, spoken_BT: Tensor | None, ideal_BT: Tensor) -> Tensor:
    """KL(p̂ ‖ ideal) ≤ min(2a, a²/2); where stopping is an event of its own, its part is added as it is (chain rule)."""
    bound_BT = torch.minimum(2 * idle_BT, idle_BT.square() / 2)
    if event_MBT is None or spoken_BT is None:
        return bound_BT
    theirs_BT = event_MBT.gather(0, ideal_BT[None])[0]
    stop_BT, go_BT = spoken_BT.exp(), log_left(spoken_BT)
    stopping_BT = stop_BT * (spoken_BT.clamp_min(LOG_ZERO) - theirs_BT.clamp_min(LOG_ZERO))
    return (stopping_BT + go_BT.exp() * (go_BT - log_left(theirs_BT))).clamp_min(0) + go_BT.exp() * bound_BT
