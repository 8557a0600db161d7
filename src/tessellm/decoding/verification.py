"""Verification: all members read the drafts of many slots in one pass, and each row keeps the tokens that the
composition would have written itself.

The token at a position is chosen from the composed distribution with the noise of its own seed and position, as a step
without drafts would choose it, and a draft stands as long as it is that token. So drafts change how fast a text comes,
never which text: greedy and sampled alike. What was fed past the last kept token is overwritten later.

Like a step, it is a function of buffers on the device: nothing is looked at in between.

Shapes: S slots, B rows (the first so many slots), G tokens of a draft, T = G + 1 tokens of a pass, M members.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..rules import normalised
from .device import SlotState, part
from .groups import member_logits
from .sampling import choose, uniform


class Verification:
    """Drafts of S slots, of at most `longest` tokens, and what came of them."""

    def __init__(self, state: SlotState, longest: int):
        slots, device = len(state.token_S), state.device
        self.state = state
        self.draft_SG = torch.full((slots, longest), -1, device=device)  # −1 behind the end of a draft
        self.room_S = torch.zeros(slots, dtype=torch.long, device=device)  # no draft is longer than this
        self.count_S = torch.zeros(slots, dtype=torch.long, device=device)  # tokens that came of the last pass
        self.token_ST = torch.zeros(slots, longest + 1, dtype=torch.long, device=device)
        self.logprob_ST = torch.zeros(slots, longest + 1, device=device)

    def verify(self, rows: int, length: int, cells: int, how: str) -> None:
        """Between one and `length` + 1 tokens more for each of the first `rows` slots."""
        state, width = self.state, length + 1
        draft_BG, start_B1 = self.draft_SG[:rows, :length], state.position_S[:rows, None]
        index_T = torch.arange(width, device=state.device)
        token_BT = torch.cat([state.token_S[:rows, None], draft_BG.clamp_min(0)], 1)
        real_BT = torch.cat([start_B1 >= 0, draft_BG >= 0], 1).long().cumprod(1).bool()
        position_BT = torch.where(real_BT, start_B1 + index_T, -1)
        logits_M = member_logits(state.groups, token_BT, position_BT, rows, cells, width)
        logp_MBTV = normalised(logits_M)
        before = part(state.rule_state, slice(rows))
        logp_BTV = state.passes.say(logp_MBTV, token_BT, real_BT, before)
        chosen_BT = self._choose(logp_BTV, start_B1 + 1 + index_T, how)
        accepted_B1 = self._accept((chosen_BT[:, :-1] == token_BT[:, 1:]) & real_BT[:, 1:])
        logprob_BT = logp_BTV.gather(-1, chosen_BT[..., None])[..., 0].float()
        count_B = (accepted_B1[:, 0] + 1) * real_BT[:, 0]
        after = None
        if before is not None:  # once more, without the drafts that fell: padding is never observed
            kept_BT = real_BT & (index_T <= accepted_B1)
            after = state.passes.observe(logp_MBTV, token_BT, kept_BT, before)
        # nothing is written before all is done that may run out of memory
        for buffer, new in zip(state.rule_state or (), after or (), strict=True):
            buffer[:rows] = new
        self.token_ST[:rows, :width] = chosen_BT
        self.logprob_ST[:rows, :width] = logprob_BT
        self.count_S[:rows] = count_B
        state.token_S[:rows] = chosen_BT.gather(1, accepted_B1)[:, 0]
        state.position_S[:rows] += count_B

    def _choose(self, logp_BTV: Tensor, position_BT: Tensor, how: str) -> Tensor:
        """The token of every position, as if it were alone."""
        rows, width = position_BT.shape
        temperature, top_p, seed = (
            buffer[:rows].repeat_interleave(width)
            for buffer in (self.state.temperature_S, self.state.top_p_S, self.state.seed_S)
        )
        noise = uniform(seed, position_BT.flatten())
        return choose(logp_BTV.flatten(0, 1), temperature, top_p, noise, how).view(rows, width)

    def _accept(self, right_BG: Tensor) -> Tensor:
        """How many tokens of each row's own draft stand: those before its first wrong one."""
        return right_BG.long().cumprod(1).sum(1, keepdim=True)

    def fetch(self, slots: list[int], length: int) -> tuple[list[list[int]], list[list[float]]]:
        """What came to these slots, in one transfer: tokens and their log-probabilities."""
        width = length + 1
        parts = (self.count_S[:, None].double(), self.token_ST[:, :width].double(), self.logprob_ST[:, :width].double())
        packed = torch.cat(parts, 1)[slots].tolist()
        tokens = [[int(token) for token in row[1 : 1 + int(row[0])]] for row in packed]
        return tokens, [row[1 + width : 1 + width + int(row[0])] for row in packed]
