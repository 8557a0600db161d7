"""Forwards over all members of some slots, in the order in which a token meets them: `prefill` reads a prompt and
chooses its first new token, then every `decode_step` adds one token per slot. (`verify`, in verification.py, adds
several.)

Each is a function of buffers on the device: nothing is looked at in between, so that it can be captured and replayed.
What a forward decides is written after all that may run out of memory, so that it can be tried again. A member is
nonfinite in a row where it computes NaN: a softmax over NaN or +∞ is NaN throughout, so that one column tells.

Shapes: S slots, B rows of the forward, T tokens per row, M members, L = M + 1 components, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...rules import BaseRule, ComposedRule, normalise, normalised
from ...rules.components import mix_components, update
from ...rules.equation import LOG_FLOOR
from ..members.groups import Group
from ..sampling import TokenChoice
from .slot_buffers import Mixing, SlotBuffers
from .slot_pass import RowOrder, TokenBatch, member_logits

Logits = Sequence[Tensor] | Tensor
Combined = tuple[Tensor, Tensor]  # composed log-probabilities, members with NaN
Decided = tuple[Tensor, Tensor, Tensor]  # tokens, their log-probabilities, members with NaN
Seen = list[tuple[Tensor, Tensor]]  # for observers: the members' log-probabilities and the composed ones, last rows


def combine(rule: BaseRule, logits_M: Logits) -> Combined:
    """Run a rule without state over the members' logits."""
    logp_MBTV = normalised(logits_M)
    token_BT = torch.zeros_like(logp_MBTV[0, ..., 0], dtype=torch.long)
    logp_BTV, _ = rule(logp_MBTV, token_BT, token_BT == 0, None)
    return logp_BTV, logp_MBTV[..., 0].isnan().any(-1).T


def decide(rule: BaseRule, logits_M: Logits) -> Decided:
    """Choose the likeliest token after the last position."""
    logp_BTV, nonfinite_BM = combine(rule, logits_M)
    logprob_B, token_B = logp_BTV[:, -1].max(-1)
    return token_B, logprob_B, nonfinite_BM


def component_rows(logp_MBV: Tensor, count_BM: Tensor) -> Tensor:
    """Return log p of every member, and of the product in which the members of a row count so often: [L, B, V]."""
    score_BV = torch.zeros_like(logp_MBV[0])
    for logp_BV, count_B in zip(logp_MBV, count_BM.T.to(logp_MBV.dtype), strict=True):
        count_B1 = count_B[:, None]
        floored_BV = torch.where(count_B1 > 0, logp_BV, logp_BV.clamp_min(LOG_FLOOR))
        score_BV = score_BV + torch.where(count_B1 == 0, 0.0, count_B1 * floored_BV)
    return torch.cat([logp_MBV, normalise(score_BV, fallback=logp_MBV[0])[None]])


class Mixed:
    """The last position of some rows, mixed by their components. On a GPU kernels do the same (mixture.py)."""

    def __init__(self, logits_M: Sequence[Tensor], log_pi_BL: Tensor, count_BM: Tensor):
        logp_MBV = normalised([logits[:, -1] for logits in logits_M])
        self.rows_LBV, self.log_pi_BL = component_rows(logp_MBV, count_BM), log_pi_BL
        self.nonfinite_BM = logp_MBV[..., 0].isnan().T

    @property
    def logp_BV(self) -> Tensor:
        """Return log p̂."""
        return mix_components(self.rows_LBV, self.log_pi_BL)

    def best(self) -> tuple[Tensor, Tensor]:
        """Return the likeliest token of every row, and its log-probability."""
        logprob_B, token_B = self.logp_BV.max(-1)
        return token_B, logprob_B

    def loglik(self, token_B: Tensor) -> Tensor:
        """Return what each component gave a token of every row: [B, L]."""
        return self.rows_LBV.gather(-1, token_B.expand(len(self.rows_LBV), -1)[..., None])[..., 0].T


@dataclass(frozen=True)
class RuleRunner:
    """The composition's rule as a device runs it best: `combine` and `decide` of that rule, called or compiled."""

    combine: Callable[[Logits], Combined]
    decide: Callable[[Logits], Decided]
    drafts_at_once: bool  # whether all tokens of a draft are read by one call of the rule


@dataclass(frozen=True)
class Workspace:
    """All that forwards work on."""

    groups: Sequence[Group]
    rule: ComposedRule
    runner: RuleRunner
    slots: SlotBuffers
    mixed: Callable[[Sequence[Tensor], Tensor, Tensor], Any]  # Mixed, or what does the same
    row_numbers: int  # logits of one position, over all members
    switch_prob: float = 0.0
    drafts: list[Tensor] = field(default_factory=list)  # of every slot, where there are drafts

    @property
    def tensors(self) -> list[Tensor]:
        """List all that forwards change, but for the members' caches."""
        return [*self.slots.tensors, *self.drafts]

    def move(self, source: int, target: int) -> None:
        """Move all that is known of a slot, but for its cells, into another."""
        for buffer in self.tensors:
            buffer[target] = buffer[source]
        self.slots.sampling.given[target] = self.slots.sampling.given[source]
        self.slots.position_S[source].fill_(-1)

    def mix(
        self,
        logits_M: Sequence[Tensor],
        at: Any,
        position_B: Tensor,
        choice: TokenChoice,
        log_pi_BL: Tensor | None = None,
    ) -> tuple[Decided, Tensor]:
        """Choose a token behind the last position of the slots `at` by their components, with their posterior or a
        later one: what was chosen, and log π after it."""
        buffers = self.slots.mixing
        log_pi_BL = buffers.log_pi_SL[at] if log_pi_BL is None else log_pi_BL
        mixed = self.mixed(logits_M, log_pi_BL, buffers.count_SM[at])
        if choice is TokenChoice.GREEDY:
            token_B, logprob_B = mixed.best()
        else:
            token_B, logprob_B = self.slots.sampling.choose(mixed.logp_BV, at, position_B, choice)
        loglik_BL = mixed.loglik(token_B).to(log_pi_BL.dtype)
        log_pi_BL = update(log_pi_BL, loglik_BL, buffers.prior_SL[at], self.switch_prob)
        return (token_B, logprob_B, mixed.nonfinite_BM), log_pi_BL


def prefill(work: Workspace, batch: TokenBatch, choice: TokenChoice, mixing: Mixing, seen: Seen | None = None) -> None:
    """Read tokens of prompts, padded on the left; at the prompts' ends also choose their first new tokens."""
    slots, slot_B = work.slots, batch.slot_B
    logits_M = member_logits(work.groups, batch)
    if choice is TokenChoice.NONE:
        slots.logprob_S.index_fill_(0, slot_B, 0.0)  # an indexed number would wait for the device
        slots.nonfinite_SM[slot_B] = normalised([logits[:, -1:] for logits in logits_M])[:, :, 0, 0].isnan().T
        return
    position_B = batch.position_BT[:, -1] + 1
    if mixing is Mixing.RULE:
        logp_B1V, nonfinite_BM = combine(work.rule, [logits[:, -1:] for logits in logits_M])
        logp_BV = logp_B1V[:, -1]
        token_B, logprob_B = slots.sampling.choose(logp_BV, slot_B, position_B, choice)
    else:
        (token_B, logprob_B, nonfinite_BM), log_pi_BL = work.mix(logits_M, slot_B, position_B, choice)
        if seen is not None:
            logp_BV = work.mixed(logits_M, slots.mixing.log_pi_SL[slot_B], slots.mixing.count_SM[slot_B]).logp_BV
        slots.mixing.log_pi_SL[slot_B] = log_pi_BL
    if seen is not None:
        seen.append((normalised([logits[:, -1] for logits in logits_M]), logp_BV))
    slots.token_S[slot_B], slots.logprob_S[slot_B] = token_B, logprob_B.float()
    slots.nonfinite_SM[slot_B], slots.position_S[slot_B] = nonfinite_BM, position_B
    if choice is TokenChoice.PENALISED:  # written, not added: a bucket may hold a row twice
        slots.sampling.counts[0][slot_B, token_B] = (position_B > 0).float()


def decode_step(
    work: Workspace, rows: int, mixing: Mixing, cells: int, choice: TokenChoice, seen: Seen | None = None
) -> None:
    """Add one token to each of the first `rows` slots; their members read so many cells."""
    slots = work.slots
    token_B1, position_B1 = slots.token_S[:rows, None], slots.position_S[:rows, None]
    real_B1, next_B = position_B1 >= 0, position_B1[:, 0] + 1
    batch = TokenBatch(token_B1, position_B1, slots.index_S[:rows], cells, 1, RowOrder.FIRST_SLOTS)
    logits_M = member_logits(work.groups, batch)
    if mixing is Mixing.COMPONENTS:
        (token_B, logprob_B, nonfinite_BM), log_pi_BL = work.mix(logits_M, slice(rows), next_B, choice)
        if seen is not None:
            logp_BV = work.mixed(logits_M, slots.mixing.log_pi_SL[:rows], slots.mixing.count_SM[:rows]).logp_BV
        old_BL = slots.mixing.log_pi_SL[:rows]
        torch.where(real_B1, log_pi_BL, old_BL, out=old_BL)
    elif choice is TokenChoice.GREEDY and seen is None:
        token_B, logprob_B, nonfinite_BM = work.runner.decide(logits_M)
    else:
        logp_B1V, nonfinite_BM = work.runner.combine(logits_M)
        logp_BV = logp_B1V[:, -1]
        token_B, logprob_B = slots.sampling.choose(logp_BV, slice(rows), next_B, choice)
    if seen is not None:
        seen.append((normalised([logits[:, -1] for logits in logits_M]), logp_BV))
    slots.token_S[:rows], slots.logprob_S[:rows] = token_B, logprob_B.float()
    slots.nonfinite_SM[:rows], slots.position_S[:rows] = nonfinite_BM, torch.where(real_B1[:, 0], next_B, -1)
    if choice is TokenChoice.PENALISED:
        slots.sampling.counts[0].index_put_((slots.index_S[:rows], token_B), real_B1[:, 0].float(), accumulate=True)
