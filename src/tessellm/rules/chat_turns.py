"""Where a chat template's prompts open, its user speaks and its answers begin, by the tokens read. Knows token
ids; no rule, no tokenizer.

Shapes: B batch, T time, W window, O tokens of the opening.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def match_opening(
    opening: Sequence[int] | Tensor, tokens_BT: Tensor, mask_BT: Tensor, before_B: Tensor
) -> tuple[Tensor, Tensor]:
    """How many tokens of the opening were read after each position (−1: something else was), and where one was."""
    if not len(opening):
        return torch.full_like(tokens_BT, -1), torch.zeros_like(mask_BT)
    opening_O = constant(opening, tokens_BT)
    place_BT = before_B.clamp_min(0)[:, None] + mask_BT.cumsum(1) - 1
    fits_BT = (place_BT < len(opening)) & (tokens_BT == opening_O[place_BT.clamp(0, len(opening) - 1)])
    broken_BT = ((mask_BT & ~fits_BT).cumsum(1) > 0) | (before_B < 0)[:, None]
    return torch.where(broken_BT, -1, place_BT + 1), mask_BT & ~broken_BT


def match_turn(turn: Sequence[int] | Tensor, token_BTW: Tensor) -> Tensor:
    """Where the last tokens of the window are those behind which an answer begins: [B, T]; nowhere without any."""
    if not len(turn):
        return torch.zeros_like(token_BTW[..., 0], dtype=torch.bool)
    return (token_BTW[..., -len(turn) :] == constant(turn, token_BTW)).all(-1)


def since_user(user: Sequence[int], token_BTW: Tensor, spaces: int = 0) -> Tensor | None:
    """Which positions of the window lie behind the last tokens in it behind which the user speaks, all where there are
    none: [B, T, W]. The last `spaces` of these tokens may be any. None: nobody knows them."""
    width, window = len(user), token_BTW.shape[-1]
    if not 0 < width <= window:
        return None
    marks_BTP = torch.ones_like(token_BTW[..., width - 1 :], dtype=torch.bool)
    for place, token in enumerate(user[: width - spaces]):
        marks_BTP = marks_BTP & (token_BTW[..., place : window - width + 1 + place] == token)
    index_W = torch.arange(window, device=token_BTW.device)
    last_BT1 = torch.where(marks_BTP, index_W[width - 1 :], -1).amax(-1, keepdim=True)
    return index_W > last_BT1


def last_turn(turn: Sequence[int], tokens: Sequence[int], upto: int) -> int | None:
    """The last position, at most `upto`, behind which an answer begins; None: there is none."""
    for end in range(upto, len(turn) - 2, -1):
        if tokens[end] == turn[-1] and tuple(tokens[end + 1 - len(turn) : end + 1]) == tuple(turn):
            return end
    return None


def silent_rows(opening: Sequence[int], turn: Sequence[int], span: int, tokens_BT: Tensor) -> int:
    """How many of the first rows of texts tell nothing of who answers, less than all: those of the opening; and, where
    an answer begins behind the last token, those further back than the last `span`."""
    length, first_BO = tokens_BT.shape[1], tokens_BT[:, : len(opening)]
    opened = first_BO.tolist() == [list(opening)] * len(tokens_BT)
    asked = all_end_with(turn, tokens_BT)
    if not asked and _holds(opening, turn):  # an answer began there already: what follows is evidence
        return 0
    return min(max(len(opening) if opened else 0, length - span if asked else 0), length - 1)


def _holds(opening: Sequence[int], turn: Sequence[int]) -> bool:
    ends = range(len(turn), len(opening) + 1)
    return any(tuple(opening[end - len(turn) : end]) == tuple(turn) for end in ends)


def all_end_with(turn: Sequence[int], tokens_BT: Tensor) -> bool:
    """Whether an answer begins behind the last token of every text."""
    return tokens_BT[:, -len(turn) :].tolist() == [list(turn)] * len(tokens_BT)


def constant(numbers: Any, like: Tensor) -> Tensor:
    """Numbers as a tensor, made where `like` is: not copied there from the host, which a CUDA graph does not allow."""
    if isinstance(numbers, Tensor):
        return numbers
    if like.device.type == "cpu":
        return torch.tensor(numbers, dtype=like.dtype)
    if isinstance(numbers[0], Sequence):
        return torch.stack([constant(row, like) for row in numbers])
    return torch.cat([like.new_full((1,), number) for number in numbers])
