"""Verification: all members read the drafts of many slots in one pass, and each row keeps the tokens that the
composition would have written itself.

The token at a position is chosen from the composed distribution with the noise of its own seed and position, as a step
without drafts would choose it, and a draft stands as long as it is that token. So drafts change how fast a text comes,
never which text: greedy and sampled alike. What was fed past the last kept token is overwritten later.

A draft that a member cannot read (NaN) may spoil its whole row, since masked cells are multiplied, not left out. Such a
row keeps nothing, and its request is told to go on without drafts.

Like a step, it is a function of buffers on the device: nothing is looked at in between.

Shapes: S slots, B rows (the first slots), G tokens of a draft, T = G + 1 tokens of a pass, M members.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ...rules import Explanation, normalised
from ..buffers import Judged, RowOrder, StepResult, TokenBatch, laid_out
from ..cuda.compiled_rule import together
from ..members.groups import member_logits
from ..passes import Workspace, choose_tokens, standing
from ..sampling import TokenChoice
from ..voices import SpecialRows

Believed = tuple[int, int]  # a member, and how surely
Show = Callable[[Judged, Tensor, Explanation], None]  # of what the rule says at every token, and why


@dataclass(frozen=True)
class DraftBuffers:
    """Drafts of S slots, and what came of them."""

    plan_SX: Tensor  # for one transfer: the four below, side by side
    room_S: Tensor  # no draft is longer than this
    done_S: Tensor  # tokens of a draft that a member has written
    writer_S: Tensor  # the member that wrote a draft, while others rested; −1: none
    draft_SG: Tensor  # −1 behind the end of a draft
    fed_TS: Tensor
    came_SX: Tensor  # for one transfer: how many tokens, the tokens, their log-probabilities, broken members, whom the
    # rule believes behind them, and how surely

    @staticmethod
    def empty(slots: int, members: int, longest: int, device: torch.device) -> DraftBuffers:
        plan_SX = torch.zeros(slots, 3 + longest, dtype=torch.long, device=device)
        fed_TS = torch.zeros(longest + 1, slots, dtype=torch.long, device=device)
        came_SX = torch.zeros(slots, 1 + 2 * (longest + 1) + members + 2, dtype=torch.double, device=device)
        own = plan_SX[:, 0], plan_SX[:, 1], plan_SX[:, 2], plan_SX[:, 3:]
        drafts = DraftBuffers(plan_SX, *own, fed_TS, came_SX)
        drafts.clear()
        return drafts

    @property
    def widest(self) -> int:
        return len(self.fed_TS)

    def clear(self) -> None:
        self.draft_SG.fill_(-1)
        self.writer_S.fill_(-1)
        self.room_S.zero_()
        self.done_S.zero_()

    def renew(self, count_B: Tensor, writer_B: Tensor) -> None:
        """Empty the drafts of the first rows, for members to go on behind so many tokens more."""
        rows = len(count_B)
        self.draft_SG[:rows] = -1
        self.done_S[:rows] = 0
        self.room_S[:rows] -= count_B
        self.writer_S[:rows] = writer_B

    def planned(self, asked: Mapping[int, tuple[int, int]]) -> Tensor:
        """Lay out on the host, for `plan_SX`, empty drafts with room for so many tokens by a member, by slot."""
        plan = torch.full(self.plan_SX.shape, -1)
        rooms, writers = [0] * len(plan), [-1] * len(plan)
        for slot, (room, writer) in asked.items():
            rooms[slot], writers[slot] = room, writer
        columns = plan.numpy()
        columns[:, 0], columns[:, 1], columns[:, 2] = rooms, 0, writers
        return plan

    def read(self, came_SX: Tensor, slots: Sequence[int], width: int) -> tuple[StepResult, list[Believed]]:
        """Sort the host's copy of `came_SX` by slot, after a pass of so many tokens: what was chosen, and whom the rule
        believes now, where it tells."""
        came, at = came_SX.numpy(), 1 + self.widest
        count, token = came[:, 0].astype(int).tolist(), came[:, 1 : 1 + width].astype(int).tolist()
        logprob, broken = came[:, at : at + width].tolist(), came[:, at + self.widest : -2].astype(bool).tolist()
        believed = came[:, -2:].astype(int).tolist()
        chosen = StepResult(
            [token[slot][: count[slot]] for slot in slots],
            [logprob[slot][: count[slot]] for slot in slots],
            [broken[slot] for slot in slots],
        )
        return chosen, [tuple(believed[slot]) for slot in slots]


def verify(
    work: Workspace,
    drafts: DraftBuffers,
    rows: int,
    length: int,
    cells: int,
    choice: TokenChoice,
    special: SpecialRows | None = None,
) -> None:
    """Add between one and `length` + 1 tokens to each of the first `rows` slots. `special`: rows that are observed, all
    of the composition's own voice."""
    slots, width = work.slots, length + 1
    draft_BG, start_B1 = drafts.draft_SG[:rows, :length], slots.position_S[:rows, None]
    last_B1, index_T = slots.token_S[:rows, None], torch.arange(width, device=draft_BG.device)
    token_BT = torch.cat([last_B1, torch.where(draft_BG < 0, last_B1, draft_BG)], 1)
    real_BT = torch.cat([start_B1 >= 0, draft_BG >= 0], 1).long().cumprod(1).bool()
    position_BT = torch.where(real_BT, start_B1 + index_T, -1)
    batch = TokenBatch(token_BT, position_BT, slots.index_S[:rows], cells, width, RowOrder.FIRST_SLOTS)
    logits_M = member_logits(work.groups, batch)
    if special is not None:
        judged = _judge_observed(work, drafts, logits_M, batch, choice, special)
    elif work.runner.judge_drafts is not None:
        before = work.states.read(work.voice, slice(rows))
        choose = None if choice is TokenChoice.GREEDY else partial(choose_along, work, choice=choice)
        judged = work.runner.judge_drafts(logits_M, token_BT, real_BT, before, choose)
    elif work.runner.drafts_at_once:
        judged = _judge_together(work, logits_M, batch, choice)
    else:
        judged = _judge_one_by_one(work, drafts, logits_M, batch, choice)
    token_BT, logprob_BT, accepted_B1, broken_BM, state = judged
    spoilt_B = logprob_BT[:, 0].isnan() & real_BT[:, 1]
    count_B = (accepted_B1[:, 0] + 1) * (real_BT[:, 0] & ~spoilt_B)
    # nothing is written before all is done that may run out of memory
    for buffer, new in zip(work.states.read(work.voice, slice(rows)) or (), state or (), strict=True):
        torch.where(spoilt_B.view(-1, *[1] * (new.ndim - 1)), buffer, new, out=buffer)
    came_BX, at = drafts.came_SX[:rows], 1 + drafts.widest
    came_BX[:, 0], came_BX[:, 1 : 1 + width] = count_B, token_BT
    came_BX[:, at : at + width], came_BX[:, at + drafts.widest : -2] = logprob_BT, broken_BM
    writer_B = drafts.writer_S[:rows]
    if work.voice.rule.lets_members_rest:
        found = work.voice.rule.believed_members(work.states.read(work.voice, slice(rows)))
        came_BX[:, -2:], writer_B = torch.stack(found, 1), found[0]
    kept_B = token_BT.gather(1, accepted_B1)[:, 0]
    slots.token_S[:rows] = torch.where(spoilt_B, slots.token_S[:rows], kept_B)
    slots.position_S[:rows] += count_B
    drafts.renew(count_B, writer_B)


def _judge_together(
    work: Workspace, logits_M: Sequence[Tensor], batch: TokenBatch, choice: TokenChoice, show: Show | None = None
) -> Judged:
    """Run the rule over all tokens at once, and once more without the drafts that fell, if one may have: padding is
    never observed. `show` what it says, and why."""
    rule, fed_BT, real_BT = work.voice.rule, batch.token_BT, batch.position_BT >= 0
    before = work.states.read(work.voice, slice(len(fed_BT)))
    logp_MBTV = normalised(logits_M)
    given, why = (logp_MBTV, fed_BT, real_BT, before), None
    if show is None:
        logp_BTV, state = rule(*given)
    else:
        logp_BTV, state, why = rule.explain(*given)
    token_BT, logprob_BT, accepted_B1, kept_BT = _standing(work, logp_BTV, batch, choice)
    if before is not None and not (kept_BT.device.type == "cpu" and torch.equal(kept_BT, real_BT)):
        state = rule(logp_MBTV, fed_BT, kept_BT, before)[1]
    judged = Judged(token_BT, logprob_BT, accepted_B1, logp_MBTV[..., 0].isnan().any(-1).T, state)
    if show is not None and why is not None:
        show(judged, logp_BTV, why)
    return judged


def _judge_observed(
    work: Workspace,
    drafts: DraftBuffers,
    logits_M: Sequence[Tensor],
    batch: TokenBatch,
    choice: TokenChoice,
    special: SpecialRows,
) -> Judged:
    """Judge, and show observers every token, those behind a fallen draft too: nobody keeps these."""
    rows, writer_B = special.voices[work.voice], drafts.writer_S[: len(batch.token_BT)]

    def show(judged: Judged, logp_BTV: Tensor, why: Explanation) -> None:
        for t, token_B in enumerate(judged.token_BT.unbind(1)):
            special.why[work.voice] = why.map(lambda column, t=t: column[rows, t : t + 1])  # type: ignore[misc]
            rested_B = torch.where(t < judged.accepted_B1[:, 0], writer_B, -1)
            special.observe([logits[:, t : t + 1] for logits in logits_M], logp_BTV[:, t], token_B, rested_B)

    return _judge_together(work, logits_M, batch, choice, show)


def _judge_one_by_one(
    work: Workspace, drafts: DraftBuffers, logits_M: Sequence[Tensor], batch: TokenBatch, choice: TokenChoice
) -> Judged:
    """Run the rule as steps would, until a draft falls. All that it is given looks as in a step, or it would be
    compiled again."""
    real_BT, start_B = batch.position_BT >= 0, work.slots.position_S[: len(batch.token_BT)]
    rows, width = real_BT.shape
    logits_TMBV = together(logits_M).permute(2, 0, 1, 3).contiguous()
    drafts.fed_TS[:width, :rows] = batch.token_BT.T
    before = state = work.states.read(work.voice, slice(rows))
    stands_B, broken_BM = start_B >= 0, torch.zeros_like(work.slots.broken_SM[:rows])
    tokens, logprobs = [], []
    for t in range(width):
        given = [logits_BV[:, None] for logits_BV in logits_TMBV[t]], drafts.fed_TS[t, :rows, None], stands_B[:, None]
        if choice is TokenChoice.GREEDY:
            token_B, logprob_B, newly_BM, new = work.runner.decide(*given, state)
        else:
            logp_B1V, newly_BM, new = work.runner.combine(*given, state)
            token_B, logprob_B = choose_tokens(work.slots, logp_B1V[:, -1], slice(rows), start_B + 1 + t, choice)
        state = new if new is None else type(new)(*map(laid_out, new, before))
        broken_BM = broken_BM | newly_BM
        tokens.append(token_B)
        logprobs.append(logprob_B.float())
        if t + 1 < width:
            stands_B = stands_B & (token_B == batch.token_BT[:, t + 1]) & real_BT[:, t + 1]
    token_BT = torch.stack(tokens, 1)
    accepted_B1, _ = standing(token_BT, batch.token_BT, real_BT)
    return Judged(token_BT, torch.stack(logprobs, 1), accepted_B1, broken_BM, state)


def _standing(
    work: Workspace, logp_BTV: Tensor, batch: TokenBatch, choice: TokenChoice
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Choose the token of every position; these, their log-probabilities, how many of each draft stand, and which
    positions are left then."""
    token_BT = choose_along(work, logp_BTV, choice)
    logprob_BT = logp_BTV.gather(-1, token_BT[..., None])[..., 0].float()
    return token_BT, logprob_BT, *standing(token_BT, batch.token_BT, batch.position_BT >= 0)


def choose_along(work: Workspace, logp_BTV: Tensor, choice: TokenChoice) -> Tensor:
    """Choose the token of every position, as if it were alone: [B, T]."""
    rows, width = logp_BTV.shape[:2]
    at = work.slots.index_S[:rows].repeat_interleave(width)
    next_BT = work.slots.position_S[:rows, None] + 1 + torch.arange(width, device=at.device)
    return choose_tokens(work.slots, logp_BTV.flatten(0, 1), at, next_BT.flatten(), choice)[0].view(rows, width)
