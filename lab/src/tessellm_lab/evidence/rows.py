"""Positions of a text for a rule with a window: blocks of them, which row came before, and the last ones of each.
Knows no rule.

Shapes: M members, B batch, T time, V vocabulary, W window, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tessellm.rules import Explained, Explanation

BLOCK = 65  # positions read at once, a window of 64 and the row before it: bounds the memory of long texts
AT_ONCE = 1 << 21  # log-probabilities that are read at once on a CPU, whose cache holds about as many


def in_blocks(
    explain: Callable[[Tensor, Tensor, Tensor, Any], Explained],
    logp_MBTV: Tensor,
    tokens_BT: Tensor,
    mask_BT: Tensor,
    state: Any,
) -> Explained:
    """Explain a long text block by block, which changes nothing but the memory that it takes."""
    size = BLOCK
    if logp_MBTV.device.type == "cpu":
        size = min(BLOCK, max(1, AT_ONCE // max(1, logp_MBTV[:, :, :1].numel())))
    if logp_MBTV.shape[2] <= size:
        return explain(logp_MBTV, tokens_BT, mask_BT, state)
    parts, whys = [], []
    blocks = zip(logp_MBTV.split(size, 2), tokens_BT.split(size, 1), mask_BT.split(size, 1), strict=True)
    for block in blocks:
        logp_BTV, state, why = explain(*block, state)
        parts.append(logp_BTV)
        whys.append(why)
    return torch.cat(parts, 1), state, joined(whys)


def joined(whys: Sequence[Explanation]) -> Explanation:
    """Put what was said of blocks of one text together."""
    share, owner, log_z = (torch.cat(pieces, 1) for pieces in zip(*(why[:3] for why in whys), strict=True))
    more = {name: torch.cat([why.more[name] for why in whys], 1) for name in whys[0].more}
    return Explanation(share, owner, log_z, more)


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
