"""A small rule with state, for tests: the member that best predicted the last tokens speaks."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tessellm.rules import BaseRule


class Memory(NamedTuple):
    """What the last `window` tokens cost each member, and the row that will be asked about the next one."""

    logp_BWM: Tensor
    pending_BMV: Tensor
    seen_B: Tensor


@dataclass(frozen=True)
class BestPredictor(BaseRule):
    name: str = "best-predictor"
    window: int = 3
    stateful = True

    def __call__(self, logp_MBTV: Tensor, tokens_BT: Tensor, mask_BT: Tensor, state: Any) -> tuple[Tensor, Any]:
        members, batch, steps, vocabulary = logp_MBTV.shape
        if state is None:
            blank = logp_MBTV.new_zeros(batch, self.window, members)
            pending = logp_MBTV.new_zeros(batch, members, vocabulary)
            state = Memory(blank, pending, torch.zeros(batch, dtype=torch.bool))
        rows = []
        for t in range(steps):
            state = self._observe(state, logp_MBTV[:, :, t].transpose(0, 1), tokens_BT[:, t], mask_BT[:, t])
            best_B = state.logp_BWM.sum(1).argmax(-1)
            rows.append(logp_MBTV[best_B, torch.arange(batch), t])
        return torch.stack(rows, dim=1), state

    def _observe(self, state: Memory, logp_BMV: Tensor, tokens_B: Tensor, real_B: Tensor) -> Memory:
        scored_BM = state.pending_BMV.gather(-1, tokens_B[:, None, None].expand(-1, logp_BMV.shape[1], 1))[..., 0]
        shifted = torch.cat([state.logp_BWM[:, 1:], scored_BM[:, None]], dim=1)
        observed = (real_B & state.seen_B)[:, None, None]
        return Memory(
            torch.where(observed, shifted, state.logp_BWM),
            torch.where(real_B[:, None, None], logp_BMV, state.pending_BMV),
            state.seen_B | real_B,
        )
