"""Positions of a text for rules with state: blocks of them, which row came before, and the last ones of each. Knows no
rule.

Shapes: M members, B batch, T time, V vocabulary, W window, F features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .protocol import Explained, Explanation
from .sums import always

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
    return torch.cat(parts, 1), state, Explanation.joined(whys)


def last_real(mask_BT: Tensor) -> Tensor:
    """The index of the last real position before each one, −1 where there is none in this chunk."""
    index_T = torch.arange(mask_BT.shape[1], device=mask_BT.device)
    upto_BT = torch.where(mask_BT, index_T, -1).cummax(1).values
    return torch.nn.functional.pad(upto_BT, (1, -1), value=-1)


def last_row(mask_BT: Tensor) -> tuple[tuple[Any, Any], Tensor | None]:
    """Where the last real row of each text is, as an index of [B, T], and which texts have one; None: all are known to,
    in the last place."""
    if always(mask_BT[:, -1]):
        return (slice(None), -1), None
    last_B = last_place(mask_BT)
    at_B = last_B.clamp(0, mask_BT.shape[1] - 1)  # both ends: a compiler of indices needs them
    return (torch.arange(len(last_B), device=last_B.device), at_B), last_B >= 0


def last_place(mask_BT: Tensor) -> Tensor:
    """The index of the last real position of each text, −1 where there is none."""
    return torch.where(mask_BT, torch.arange(mask_BT.shape[1], device=mask_BT.device), -1).amax(1)


def kept(new_B: Tensor, old_B: Tensor, any_B: Tensor | None) -> Tensor:
    """What is new where a text has a row in the block, what was before elsewhere; any dimensions behind the batch."""
    return new_B if any_B is None else torch.where(any_B.view(-1, *[1] * (new_B.dim() - 1)), new_B, old_B)


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


def noted(averaged_BTF: Tensor, inside_BT: Tensor, tokens_BT: Tensor) -> Tensor:
    """What is kept of positions, zero inside the template's opening: the averaged numbers, whether they count, the
    token."""
    counts_BT1 = (~inside_BT)[..., None].to(averaged_BTF.dtype)
    return torch.cat([averaged_BTF * counts_BT1, counts_BT1, tokens_BT[..., None].to(counts_BT1.dtype)], -1)


def averages(window_BTWF: Tensor, numbers: int, counts_BTW: Tensor | None = None) -> Tensor:
    """The numbers that are averaged, so many per expert, over the positions that count: [B, T, K, numbers]."""
    total_BTF = (window_BTWF if counts_BTW is None else window_BTWF * counts_BTW[..., None]).sum(-2)
    return (total_BTF[..., :-1] / total_BTF[..., -1:].clamp_min(1)).unflatten(-1, (-1, numbers))
