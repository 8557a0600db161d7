"""Verification: all members read the drafts of many slots in one pass, and each row keeps the tokens that the
composition would have written itself.

The token at a position is chosen from the composed distribution with the noise of its own seed and position, as a step
without drafts would choose it, and a draft stands as long as it is that token. So drafts change how fast a text comes,
never which text: greedy and sampled alike. What was fed past the last kept token is overwritten later.

Like a step, it is a function of buffers on the device: nothing is looked at in between.

Shapes: S slots, B rows (the first so many slots), G tokens of a draft, T = G + 1 tokens of a pass, M members.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..members.groups import member_logits
from ..sampling import choose, uniform
from ..state import SlotState, part

Judged = tuple[Tensor, Tensor, Tensor, Any]  # tokens, their log-probabilities, how many drafts stand, the rule's state


class Verification:
    """Drafts of S slots, of at most `longest` tokens, and what came of them."""

    def __init__(self, state: SlotState, longest: int):
        slots, device = len(state.token_S), state.device
        self.state, self.widest = state, longest + 1
        self.draft_SG = torch.full((slots, longest), -1, device=device)  # −1 behind the end of a draft
        self.room_S = torch.zeros(slots, dtype=torch.long, device=device)  # no draft is longer than this
        self.fed_TS = torch.zeros(longest + 1, slots, dtype=torch.long, device=device)
        # what came of the last pass, for one transfer: how many tokens, the tokens, their log-probabilities
        self.came_SX = torch.zeros(slots, 1 + 2 * self.widest, dtype=torch.double, device=device)

    def verify(self, rows: int, length: int, cells: int, how: str) -> None:
        """Between one and `length` + 1 tokens more for each of the first `rows` slots."""
        state, width = self.state, length + 1
        draft_BG, start_B1 = self.draft_SG[:rows, :length], state.position_S[:rows, None]
        index_T = torch.arange(width, device=state.device)
        token_BT = torch.cat([state.token_S[:rows, None], draft_BG.clamp_min(0)], 1)
        real_BT = torch.cat([start_B1 >= 0, draft_BG >= 0], 1).long().cumprod(1).bool()
        position_BT = torch.where(real_BT, start_B1 + index_T, -1)
        logits_M = member_logits(state.groups, token_BT, position_BT, rows, cells, width)
        judge = self._together if state.passes.at_once else self._one_by_one
        chosen_BT, logprob_BT, accepted_B1, after = judge(logits_M, token_BT, real_BT, start_B1 + 1 + index_T, how)
        count_B = (accepted_B1[:, 0] + 1) * real_BT[:, 0]
        # nothing is written before all is done that may run out of memory
        for buffer, new in zip(state.rule_state or (), after or (), strict=True):
            buffer[:rows] = new
        self.came_SX[:rows, 0] = count_B
        self.came_SX[:rows, 1 : 1 + width] = chosen_BT
        self.came_SX[:rows, 1 + self.widest : 1 + self.widest + width] = logprob_BT
        state.token_S[:rows] = chosen_BT.gather(1, accepted_B1)[:, 0]
        state.position_S[:rows] += count_B

    def _together(
        self, logits_M: Sequence[Tensor], token_BT: Tensor, real_BT: Tensor, position_BT: Tensor, how: str
    ) -> Judged:
        """The rule over all tokens at once, and once more without the drafts that fell: padding is never observed."""
        before = part(self.state.rule_state, slice(len(token_BT)))
        along = self.state.passes.along(logits_M, token_BT, real_BT, before)
        chosen_BT = self._choose(along.logp_BTV, position_BT, how)
        accepted_B1 = self._accept((chosen_BT[:, :-1] == token_BT[:, 1:]) & real_BT[:, 1:])
        logprob_BT = along.logp_BTV.gather(-1, chosen_BT[..., None])[..., 0].float()
        kept_BT = real_BT & (torch.arange(token_BT.shape[1], device=real_BT.device) <= accepted_B1)
        return chosen_BT, logprob_BT, accepted_B1, None if before is None else along.after(kept_BT)

    def _one_by_one(
        self, logits_M: Sequence[Tensor], token_BT: Tensor, real_BT: Tensor, position_BT: Tensor, how: str
    ) -> Judged:
        """The rule as steps would run it, until a draft falls. All that it is given looks as in a step, or it would be
        compiled again."""
        rows, width = token_BT.shape
        logits_TMBV = torch.stack(list(logits_M)).permute(2, 0, 1, 3).contiguous()
        self.fed_TS[:width, :rows] = token_BT.T
        before = state = part(self.state.rule_state, slice(rows))
        stands_B = self.state.position_S[:rows] >= 0
        right, chosen, logprobs = [], [], []
        for t in range(width):
            logits_M = [logits_BV[:, None] for logits_BV in logits_TMBV[t]]
            token_B, logprob_B, new = self.state.by_rule(
                logits_M, self.fed_TS[t, :rows, None], stands_B[:, None], state, position_BT[:, t], how
            )
            state = new if new is None else type(new)(*map(_laid_out, new, before))
            chosen.append(token_B)
            logprobs.append(logprob_B.float())
            if t + 1 < width:
                right.append((token_B == token_BT[:, t + 1]) & real_BT[:, t + 1])
                stands_B = stands_B & right[-1]
        return torch.stack(chosen, 1), torch.stack(logprobs, 1), self._accept(torch.stack(right, 1)), state

    def _choose(self, logp_BTV: Tensor, position_BT: Tensor, how: str) -> Tensor:
        """The token of every position, as if it were alone."""
        if how == "greedy":
            return logp_BTV.argmax(-1)
        rows, width = position_BT.shape
        state = self.state
        temperature, top_p, top_k, seed = (
            buffer[:rows].repeat_interleave(width)
            for buffer in (state.temperature_S, state.top_p_S, state.top_k_S, state.seed_S)
        )
        noise = uniform(seed, position_BT.flatten())
        return choose(logp_BTV.flatten(0, 1), temperature, top_p, top_k, noise, how).view(rows, width)

    def _accept(self, right_BG: Tensor) -> Tensor:
        """How many tokens of each row's own draft stand: those before its first wrong one."""
        return right_BG.long().cumprod(1).sum(1, keepdim=True)

    def read(self, came: Sequence[Sequence[float]], slots: Sequence[int]) -> tuple[list[list[int]], list[list[float]]]:
        """What came to these slots: tokens and their log-probabilities."""
        tokens, logprobs = [], []
        for slot in slots:
            row = came[slot]
            count = int(row[0])
            tokens.append(list(map(int, row[1 : 1 + count])))
            logprobs.append(list(row[1 + self.widest : 1 + self.widest + count]))
        return tokens, logprobs


def _laid_out(new: Tensor, like: Tensor) -> Tensor:
    """The same numbers, in memory as another tensor lies."""
    if new.stride() == like.stride():
        return new
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device).copy_(new)
