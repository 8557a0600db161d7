"""Prompts as graphs: passes over the ends of short prompts, whose kernels would take longer to start than to run.

They come in few shapes: rows in powers of two (some twice, if need be), widths and cells in buckets, padded on the
left. A shape is run as it is when it first comes, since many come once, and is captured when it comes again.

Shapes: B rows, T tokens of the widest row, X = 1 + 2 · width numbers that a row is given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..state import SlotState

MOST_TOKENS = 1024  # padded ones of a pass; a larger one computes for as long as its kernels take to start
MOST_NUMBERS = 1 << 27  # log-probabilities that the rule reads: it makes several such tensors, which graphs keep
NARROWEST = 32

Shape = tuple[int, int, int, str]  # rows, width, cells, how the first new token is chosen


@dataclass(frozen=True)
class Piece:
    """Some rows of a pass: the slot of each, its tokens, padded on the left, and their positions (−1: padding)."""

    given_BX: Tensor
    stop: int  # cells that are read

    @property
    def rows(self) -> int:
        return len(self.given_BX)

    @property
    def width(self) -> int:
        return self.given_BX.shape[1] // 2


class PromptGraphs:
    """Which shapes came before, and the buffers that their passes read."""

    def __init__(self, state: SlotState):
        self.state, self.on = state, True
        self._met: set[Shape] = set()
        self._given: dict[tuple[int, int], Tensor] = {}

    def takes(self, piece: Piece) -> bool:
        """Whether a graph is worth its memory."""
        heard = min(piece.width, self.state.rule.window + 1) * self.state.row_numbers
        return self.on and piece.rows * piece.width <= MOST_TOKENS and piece.rows * heard <= MOST_NUMBERS

    def met(self, shapes: Sequence[Shape]) -> bool:
        """Whether all of these came before."""
        return self._met.issuperset(shapes)

    def note(self, shapes: Sequence[Shape]) -> None:
        """These were run, so that caches and the rule's state are there."""
        self._met.update(shapes)

    def put(self, piece: Piece, on_device: Callable[[Tensor], Tensor]) -> None:
        """What the next pass of this shape reads."""
        given_BX, key = on_device(piece.given_BX), (piece.rows, piece.width)
        if key in self._given:
            self._given[key].copy_(given_BX)
        else:
            self._given[key] = given_BX

    def feed(self, rows: int, width: int, cells: int, how: str) -> None:
        """The pass, as a function of buffers on the device."""
        slot_B, token_BT, position_BT = self._given[rows, width].split([1, width, width], 1)
        self.state.prefill(slot_B[:, 0], token_BT, position_BT, cells, how)


def cut(slots: Sequence[int], token_BT: Tensor, position_BT: Tensor) -> list[Piece]:
    """A left-padded pass as pieces of few shapes."""
    pieces, first = [], 0
    counts = (position_BT >= 0).sum(1).tolist()
    for own, rows in shares(len(slots)):
        at_B = torch.arange(first, first + rows).clamp_max(first + own - 1)  # the last one again and again
        count = max(counts[first : first + own])
        width = bucket(count)
        given_BX = torch.zeros(rows, 1 + 2 * width, dtype=torch.long)
        given_BX[:, 0] = torch.tensor(slots)[at_B]
        given_BX[:, 1 + width - count : 1 + width] = token_BT[at_B, -count:]
        given_BX[:, 1 + width :] = -1
        given_BX[:, 1 + 2 * width - count :] = position_BT[at_B, -count:]
        pieces.append(Piece(given_BX, int(position_BT[at_B].max()) + 1))
        first += own
    return pieces


def nothing(rows: int, length: int) -> Piece:
    """A piece for prompts of that length, of padding alone, all of it for the first slot."""
    given_BX = torch.zeros(rows, 1 + 2 * bucket(length), dtype=torch.long)
    given_BX[:, 1 + bucket(length) :] = -1
    return Piece(given_BX, length)


def shares(rows: int) -> list[tuple[int, int]]:
    """How many rows each piece takes, and has: powers of two, up to a quarter of them over."""
    power = 1 << (rows - 1).bit_length()
    if 3 * power <= 4 * rows:
        return [(rows, power)]
    return [(power // 2, power // 2), *shares(rows - power // 2)]


def bucket(width: int) -> int:
    """The next power of two, or three quarters of it where that is enough: less than half is padding."""
    power = 1 << (max(width, NARROWEST) - 1).bit_length()
    return power * 3 // 4 if max(width, NARROWEST) <= power * 3 // 4 else power
