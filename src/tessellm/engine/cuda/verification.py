"""Verification over all members of some slots: they read the drafts in one forward, and each row keeps the tokens that
the composition would have written itself. What was read past the last kept token is overwritten later.

A draft that a member cannot read (NaN) may spoil its whole row, since masked cells are multiplied, not left out. Such a
row keeps nothing, and its request goes on without drafts.

Like a step, it is a function of buffers on the device: nothing is looked at in between.

Shapes: S slots, B rows (the first slots), G tokens of a draft, T = G + 1 tokens of a forward, M members.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..executor import StepResult
from ..sampling import TokenChoice
from .compiled_rule import together
from .passes import Workspace
from .slot_buffers import Mixing
from .slot_pass import RowOrder, TokenBatch, member_logits


class Judged(NamedTuple):
    """What the composition writes along a draft."""

    token_BT: Tensor
    logprob_BT: Tensor
    accepted_B1: Tensor  # tokens of the row's own draft before its first wrong one
    nonfinite_BM: Tensor
    log_pi_BL: Tensor | None = None  # after what is kept


@dataclass(frozen=True)
class DraftBuffers:
    """Drafts of S slots, and what came of them."""

    draft_SG: Tensor  # −1 behind the end of a draft
    came_SX: Tensor  # for one transfer: how many tokens, the tokens, their log-probabilities, members with NaN

    @staticmethod
    def empty(slots: int, members: int, longest: int, device: torch.device) -> DraftBuffers:
        draft_SG = torch.full((slots, longest), -1, device=device)
        came_SX = torch.zeros(slots, 1 + 2 * (longest + 1) + members, dtype=torch.double, device=device)
        return DraftBuffers(draft_SG, came_SX)

    @property
    def widest(self) -> int:
        return self.draft_SG.shape[1] + 1

    def clear(self) -> None:
        self.draft_SG.fill_(-1)

    def planned(self, slots: Sequence[int], drafts: Sequence[Sequence[int]]) -> Tensor:
        """Lay out drafts on the host, for `draft_SG`."""
        draft_SG = torch.full(self.draft_SG.shape, -1)
        for slot, draft in zip(slots, drafts, strict=True):
            draft_SG[slot, : len(draft)] = torch.tensor(draft, dtype=torch.long)
        return draft_SG

    def read(self, came_SX: Tensor, slots: Sequence[int], width: int) -> StepResult:
        """Sort the host's copy of `came_SX` by slot, after a forward of so many tokens."""
        came, at = came_SX.numpy(), 1 + self.widest
        count, token = came[:, 0].astype(int).tolist(), came[:, 1 : 1 + width].astype(int).tolist()
        logprob, nonfinite = came[:, at : at + width].tolist(), came[:, at + self.widest :].astype(bool).tolist()
        return StepResult(
            [token[slot][: count[slot]] for slot in slots],
            [logprob[slot][: count[slot]] for slot in slots],
            [nonfinite[slot] for slot in slots],
        )


def verify(
    work: Workspace, drafts: DraftBuffers, rows: int, length: int, mixing: Mixing, cells: int, choice: TokenChoice
) -> None:
    """Add between one and `length` + 1 tokens to each of the first `rows` slots."""
    slots, width = work.slots, length + 1
    draft_BG, start_B1 = drafts.draft_SG[:rows, :length], slots.position_S[:rows, None]
    last_B1, index_T = slots.token_S[:rows, None], torch.arange(width, device=draft_BG.device)
    token_BT = torch.cat([last_B1, torch.where(draft_BG < 0, last_B1, draft_BG)], 1)
    real_BT = torch.cat([start_B1 >= 0, draft_BG >= 0], 1).long().cumprod(1).bool()
    position_BT = torch.where(real_BT, start_B1 + index_T, -1)
    batch = TokenBatch(token_BT, position_BT, slots.index_S[:rows], cells, width, RowOrder.FIRST_SLOTS)
    logits_M = member_logits(work.groups, batch)
    if mixing is Mixing.COMPONENTS or not work.runner.drafts_at_once:
        judged = _judge_one_by_one(work, logits_M, batch, mixing, choice)
    else:
        judged = _judge_together(work, logits_M, batch, choice)
    token_BT, logprob_BT, accepted_B1, nonfinite_BM, log_pi_BL = judged
    nonfinite_B = logprob_BT[:, 0].isnan() & real_BT[:, 1]
    count_B = (accepted_B1[:, 0] + 1) * (real_BT[:, 0] & ~nonfinite_B)
    # nothing is written before all is done that may run out of memory
    if log_pi_BL is not None:
        old_BL = slots.mixing.log_pi_SL[:rows]
        torch.where(nonfinite_B[:, None], old_BL, log_pi_BL, out=old_BL)
    came_BX, at = drafts.came_SX[:rows], 1 + drafts.widest
    came_BX[:, 0], came_BX[:, 1 : 1 + width] = count_B, token_BT
    came_BX[:, at : at + width], came_BX[:, at + drafts.widest :] = logprob_BT, nonfinite_BM
    kept_B = token_BT.gather(1, accepted_B1)[:, 0]
    slots.token_S[:rows] = torch.where(nonfinite_B, slots.token_S[:rows], kept_B)
    slots.position_S[:rows] += count_B


def accepted(token_BT: Tensor, batch: TokenBatch) -> Tensor:
    """Return each draft's accepted length, [B, 1]. `token_BT`: what is written behind each token that was read."""
    right_BG = (token_BT[:, :-1] == batch.token_BT[:, 1:]) & (batch.position_BT[:, 1:] >= 0)
    return right_BG.long().cumprod(1).sum(1, keepdim=True)


def _judge_together(work: Workspace, logits_M: Sequence[Tensor], batch: TokenBatch, choice: TokenChoice) -> Judged:
    """Run the rule over all tokens at once."""
    logp_BTV, nonfinite_BM = work.runner.combine(logits_M)
    token_BT = choose_along(work, logp_BTV, choice)
    logprob_BT = logp_BTV.gather(-1, token_BT[..., None])[..., 0].float()
    return Judged(token_BT, logprob_BT, accepted(token_BT, batch), nonfinite_BM)


def _judge_one_by_one(
    work: Workspace, logits_M: Sequence[Tensor], batch: TokenBatch, mixing: Mixing, choice: TokenChoice
) -> Judged:
    """Run the rule, or mix, as steps would. All that a compiled rule is given looks as in a step, or it would be
    compiled again."""
    rows, width = batch.token_BT.shape
    start_B, at = work.slots.position_S[:rows], slice(rows)
    logits_TMBV = together(logits_M).permute(2, 0, 1, 3).contiguous()
    tokens, logprobs = [], []
    log_pi_BL, kept_B = work.slots.mixing.log_pi_SL[:rows], start_B >= 0
    nonfinite_BM = torch.zeros_like(work.slots.nonfinite_SM[:rows])
    for t in range(width):
        given = [logits_BV[:, None] for logits_BV in logits_TMBV[t]]
        if mixing is Mixing.COMPONENTS:
            (token_B, logprob_B, newly_BM), new_BL = work.mix(given, at, start_B + 1 + t, choice, log_pi_BL)
            log_pi_BL = torch.where(kept_B[:, None], new_BL, log_pi_BL)
        elif choice is TokenChoice.GREEDY:
            token_B, logprob_B, newly_BM = work.runner.decide(given)
        else:
            logp_B1V, newly_BM = work.runner.combine(given)
            token_B, logprob_B = work.slots.sampling.choose(logp_B1V[:, -1], at, start_B + 1 + t, choice)
        nonfinite_BM = nonfinite_BM | newly_BM
        tokens.append(token_B)
        logprobs.append(logprob_B.float())
        if t + 1 < width:
            kept_B = kept_B & (token_B == batch.token_BT[:, t + 1]) & (batch.position_BT[:, t + 1] >= 0)
    token_BT = torch.stack(tokens, 1)
    pi_BL = log_pi_BL if mixing is Mixing.COMPONENTS else None
    return Judged(token_BT, torch.stack(logprobs, 1), accepted(token_BT, batch), nonfinite_BM, pi_BL)


def choose_along(work: Workspace, logp_BTV: Tensor, choice: TokenChoice) -> Tensor:
    """Choose the token of every position, as if it were alone: [B, T]."""
    rows, width = logp_BTV.shape[:2]
    at = work.slots.index_S[:rows].repeat_interleave(width)
    next_BT = work.slots.position_S[:rows, None] + 1 + torch.arange(width, device=at.device)
    return work.slots.sampling.choose(logp_BTV.flatten(0, 1), at, next_BT.flatten(), choice)[0].view(rows, width)
