"""What is worth knowing of a row of log-probabilities: numbers, never distributions. What they take of whole rows is
read in sweep.py; the rest follows here from that.

Pure functions of tensors; nothing waits for the host. Divergences are between laws as the rule hears them:
each expert tilted by its weight, all ways to stop as one event. So an expert with weight 0.5 is at distance zero from
itself, and end tokens that differ are no interference.

Shapes: M members (0 is the base), K experts, B batch, T time, V vocabulary, N voices: members, then composed,
L laws: members, then Eq. 2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..rules import ComposedRule, Explanation
from ..rules.equation import LOG_FLOOR
from ..rules.termination import ends_on, log_left
from .owners import owners
from .sweep import Swept, sweep

TOLD = ("evidence_BTM", "trusted_BTM", "interference_BT", "blended_BT", "law_BTL")  # by some rules
ACTIVE = 0.1  # an expert is active where it diverges from the base by more than this (nats)


class Statistics(NamedTuple):
    """One row a position; the row at t is about the law of the next token."""

    owner_BT: Tensor  # whose word it is: see `owners`
    share_BTM: Tensor  # of each member in what is said, as the rule has it; sums to 1
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
    law_BTL: Tensor | None = None  # where the rule is a mixture: how far it believes the base, every expert, Eq. 2


@torch.no_grad()
def statistics(
    logp_MBTV: Tensor, composed_BTV: Tensor, rule: ComposedRule, ends: tuple[tuple[int, ...], ...], why: Explanation
) -> Statistics:
    """`ends`: every member's end tokens; `why`: what the rule says of itself."""
    swept = sweep(logp_MBTV.flatten(1, 2), composed_BTV.flatten(0, 1), rule)
    shape: Any = composed_BTV.shape[:2]
    rows = Swept._make(None if each is None else each.unflatten(0, shape) for each in swept)
    gap_kl_BT, nearest_BT = rows.away_RM.min(-1)
    ids_BTNC = rows.top_ids_RNC
    ideal_BT, idle_BT = rule.idle_budget(rows.divergence_RK, rows.epsilon_RK, why)
    return Statistics(
        owner_BT=owners(nearest_BT * (rows.away_RM[..., 0] > gap_kl_BT + ACTIVE), why),
        share_BTM=why.belief_BTM,
        divergence_BTK=rows.divergence_RK,
        jensen_shannon_BTK=rows.jensen_shannon_RK,
        total_variation_BTK=rows.total_variation_RK,
        epsilon_BTK=rows.epsilon_RK,
        log_z_BT=rows.log_z_R,
        pair_log_z_BTKK=rows.pair_log_z_RKK,
        pair_accord_BTKK=rows.pair_accord_RKK,
        clash_BT=rows.clash_R,
        idle_BT=idle_BT,
        bound_BT=gap_bound(idle_BT, rows.event_RN, ideal_BT),
        gap_BT=rows.gap_R,
        gap_kl_BT=gap_kl_BT,
        novel_BT=(ids_BTNC[..., :-1, 0] != ids_BTNC[..., -1:, 0]).all(-1),
        entropy_BTN=rows.entropy_RN,
        top_ids_BTNC=ids_BTNC,
        top_logprobs_BTNC=rows.top_logprobs_RNC,
        hazard_BTN=hazards(logp_MBTV, composed_BTV, ends),
        **{name: why.more[name] for name in TOLD if name in why.more},
    )


def hazards(logp_MBTV: Tensor, composed_BTV: Tensor, stops: tuple[tuple[int, ...], ...]) -> Tensor:
    """Each member's probability of its own end tokens, and the composition's of any."""
    if not any(stops):
        members, batch, steps, _ = logp_MBTV.shape
        return logp_MBTV.new_zeros(batch, steps, members + 1)
    ends = ends_on(stops, logp_MBTV.device)
    own_MBTE = logp_MBTV.index_select(-1, ends.token_E).exp() * ends.own_ME[:, None, None]
    any_BT = composed_BTV.index_select(-1, ends.token_E).exp().sum(-1)
    return torch.cat([own_MBTE.sum(-1), any_BT[None]]).permute(1, 2, 0)


def gap_bound(idle_BT: Tensor, event_BTN: Tensor | None, ideal_BT: Tensor) -> Tensor:
    """KL(p̂ ‖ ideal) ≤ min(2a, a²/2); where stopping is an event of its own, its part is added as it is (chain rule)."""
    bound_BT = torch.minimum(2 * idle_BT, idle_BT.square() / 2)
    if event_BTN is None:
        return bound_BT
    theirs_BT, spoken_BT = event_BTN.gather(-1, ideal_BT[..., None])[..., 0], event_BTN[..., -1]
    stop_BT, go_BT = spoken_BT.exp(), log_left(spoken_BT)
    stopping_BT = stop_BT * (spoken_BT.clamp_min(LOG_FLOOR) - theirs_BT.clamp_min(LOG_FLOOR))
    return (stopping_BT + go_BT.exp() * (go_BT - log_left(theirs_BT))).clamp_min(0) + go_BT.exp() * bound_BT
