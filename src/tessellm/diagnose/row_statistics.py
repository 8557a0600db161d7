"""What is worth knowing of a row of log-probabilities: numbers, never distributions. What they take of whole rows is
read in sweep.py; the rest follows here from that.

Pure functions of tensors; nothing waits for the host. Divergences are between distributions as the rule reads them,
each expert tilted by its weight: one with weight 0.5 is at distance zero from itself.

Shapes: M members (0 is the base), K experts, B batch, T time, V vocabulary, N: members, then composed.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..rules import ComposedRule, Explanation
from .owners import owners
from .sweep import Swept, sweep

ACTIVE = 0.1  # an expert is active where it diverges from the base by more than this (nats)


class Statistics(NamedTuple):
    """One row a position; the row at t is about the distribution of the next token."""

    owner_BT: Tensor  # whose word it is: see `owners`
    share_BTM: Tensor  # of each member in what is said, as the rule has it; sums to 1
    divergence_BTK: Tensor  # KL(p_i ‖ p_b), nats
    epsilon_BTK: Tensor  # sup_v |log p_i − log p_b|
    log_z_BT: Tensor  # of Eq. 2 over all experts: zero where the theory holds
    pair_log_z_BTKK: Tensor  # of Eq. 2 over two experts; zero on the diagonal
    pair_accord_BTKK: Tensor  # how much of Eq. 2 over two experts is what both of them want; one on the diagonal
    clash_BT: Tensor  # total variation between Eq. 2 over all experts and the nearest member, whatever the rule
    gap_BT: Tensor  # total variation between the composed distribution and the nearest member's
    gap_kl_BT: Tensor  # KL(p̂ ‖ nearest member)
    novel_BT: Tensor  # the composed favourite is nobody's
    entropy_BTN: Tensor
    top_ids_BTNC: Tensor
    top_logprobs_BTNC: Tensor
    hazard_BTN: Tensor  # probability of stopping now
    more: Mapping[str, Tensor]  # what the rule alone can tell; of a mixture `law_BTL`

    def columns(self) -> dict[str, Tensor]:
        """Return everything by name, without shapes."""
        own = {name: each for name, each in self._asdict().items() if name != "more"}
        return {name.rpartition("_")[0]: each for name, each in (dict(self.more) | own).items()}


@torch.no_grad()
def statistics(
    logp_MBTV: Tensor, composed_BTV: Tensor, rule: ComposedRule, ends: tuple[tuple[int, ...], ...], why: Explanation
) -> Statistics:
    """`ends`: every member's end tokens; `why`: what the rule says of itself."""
    swept = sweep(logp_MBTV.flatten(1, 2), composed_BTV.flatten(0, 1), rule)
    shape: Any = composed_BTV.shape[:2]
    rows = Swept._make(each.unflatten(0, shape) for each in swept)
    gap_kl_BT, nearest_BT = rows.away_RM.min(-1)
    ids_BTNC = rows.top_ids_RNC
    return Statistics(
        owner_BT=owners(nearest_BT * (rows.away_RM[..., 0] > gap_kl_BT + ACTIVE), why),
        share_BTM=why.share_BTM,
        divergence_BTK=rows.divergence_RK,
        epsilon_BTK=rows.epsilon_RK,
        log_z_BT=rows.log_z_R,
        pair_log_z_BTKK=rows.pair_log_z_RKK,
        pair_accord_BTKK=rows.pair_accord_RKK,
        clash_BT=rows.clash_R,
        gap_BT=rows.gap_R,
        gap_kl_BT=gap_kl_BT,
        novel_BT=(ids_BTNC[..., :-1, 0] != ids_BTNC[..., -1:, 0]).all(-1),
        entropy_BTN=rows.entropy_RN,
        top_ids_BTNC=ids_BTNC,
        top_logprobs_BTNC=rows.top_logprobs_RNC,
        hazard_BTN=hazards(logp_MBTV, composed_BTV, ends),
        more=why.more,
    )


def hazards(logp_MBTV: Tensor, composed_BTV: Tensor, ends: tuple[tuple[int, ...], ...]) -> Tensor:
    """Each member's probability of its own end tokens, and the composition's of any."""
    token_E, own_ME = _end_tokens(ends, logp_MBTV.device)
    own_MBTE = logp_MBTV.index_select(-1, token_E).exp() * own_ME[:, None, None]
    any_BT = composed_BTV.index_select(-1, token_E).exp().sum(-1)
    return torch.cat([own_MBTE.sum(-1), any_BT[None]]).permute(1, 2, 0)


@lru_cache(maxsize=64)
def _end_tokens(ends: tuple[tuple[int, ...], ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return all end tokens, and whose each is. Made once: making them waits for the device."""
    tokens = sorted({token for ids in ends for token in ids})
    with torch.inference_mode(False):
        own = [[token in ids for token in tokens] for ids in ends]
        return torch.tensor(tokens, dtype=torch.long, device=device), torch.tensor(own, device=device)
