"""Positions of a text for rules with state: which row came before, and the last ones of each. Knows no rule.

Shapes: B batch, T time, W window, F features.
"""

from __future__ import annotations

import torch
from torch import Tensor


def last_real(mask_BT: Tensor) -> Tensor:
    """The index of the last real position before each one, −1 where there is none in this chunk."""
    index_T = torch.arange(mask_BT.shape[1], device=mask_BT.device)
    upto_BT = torch.where(mask_BT, index_T, -1).cummax(1).values
    return torch.nn.functional.pad(upto_BT, (1, -1), value=-1)


def windows(ring_BWF: Tensor, new_BTF: Tensor, mask_BT: Tensor) -> Tensor:
    """The last W real positions up to and with each new one: [B, T, W, F]. Padding takes no place."""
    batch, window, features = ring_BWF.shape
    steps = new_BTF.shape[1]
    if steps == 1:
        shifted_BWF = torch.cat([ring_BWF[:, 1:], new_BTF], 1)
        return torch.where(mask_BT[..., None], shifted_BWF, ring_BWF)[:, None]
    count_BT = mask_BT.cumsum(1)
    spare = window + steps  # where padding goes
    slot_BT = torch.where(mask_BT, window - 1 + count_BT, spare)
    line_BLF = torch.cat([ring_BWF, ring_BWF.new_zeros(batch, steps + 1, features)], 1)
    line_BLF = line_BLF.scatter(1, slot_BT[..., None].expand(-1, -1, features), new_BTF)
    at_BTW = count_BT[..., None] + torch.arange(window, device=mask_BT.device)
    flat_BJF = at_BTW.flatten(1)[..., None].expand(-1, -1, features)
    return line_BLF.gather(1, flat_BJF).view(batch, steps, window, features)
