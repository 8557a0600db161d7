"""Cut passes over short prompts, and over short pieces of long ones, into few shapes, so that they can be graphs: their
kernels take longer to start than to run.

Rows come in powers of two (some twice, if need be), widths and cells in buckets, padded on the left. A shape is run as
it is when it first comes, since many come once, and is captured when it comes again.

Shapes: B rows, T tokens of the widest row, X = 1 + 2 · width numbers per row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..prefill_controller import LEAST_ON_GPU
from ..sampling import TokenChoice
from .passes import Workspace, prefill
from .slot_buffers import Mixing
from .slot_pass import TokenBatch

MOST_TOKENS = 1024  # padded tokens of a pass; a larger one computes for as long as its kernels take to start
MOST_NUMBERS = 1 << 27  # log-probabilities that the rule reads: it makes several such tensors, which graphs keep
NARROWEST = 32
PREPARED_ENDS = (TokenChoice.GREEDY, TokenChoice.PENALISED)  # of prompts; the last does for all

PromptShape = tuple[int, int, Mixing, int, TokenChoice]  # rows, width, cells, and how the first new token is chosen


@dataclass(frozen=True)
class PromptRows:
    """Some rows of a pass, in a bucket: per row its slot, its tokens, padded on the left, and their positions."""

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

    def __init__(self, work: Workspace):
        self.work, self.on = work, True
        self._met: set[PromptShape] = set()
        self._given: dict[tuple[int, int], Tensor] = {}

    @property
    def any_cells(self) -> bool:
        """Whether a pass reads as many cells as it needs, so that one graph does for all."""
        return all(group.reads_fused for group in self.work.groups)

    def turn_off(self) -> None:
        self.on = False

    def takes(self, part: PromptRows) -> bool:
        """Whether a graph is worth its memory."""
        fits = part.rows * self.work.row_numbers <= MOST_NUMBERS
        return self.on and part.rows * part.width <= MOST_TOKENS and fits

    def kinds(self, part: PromptRows) -> list[TokenChoice]:
        """List how tokens behind prompts of a shape are chosen: whole ones, several together; chunks one by one."""
        chunk = part.rows == 1 and part.width >= LEAST_ON_GPU
        return [*PREPARED_ENDS, *([TokenChoice.NONE] if chunk else [])] if self.takes(part) else []

    def met(self, shapes: Sequence[PromptShape]) -> bool:
        """Whether all these shapes came before."""
        return self._met.issuperset(shapes)

    def note(self, shapes: Sequence[PromptShape]) -> None:
        """Note that shapes were run, so that caches and the rule's state are there."""
        self._met.update(shapes)

    def put(self, part: PromptRows, on_device: Callable[[Tensor], Tensor]) -> None:
        """Write what the next pass of this shape reads."""
        given_BX, key = on_device(part.given_BX), (part.rows, part.width)
        if key in self._given:
            self._given[key].copy_(given_BX)
        else:
            self._given[key] = given_BX

    def read(self, rows: int, width: int, mixing: Mixing, cells: int, choice: TokenChoice) -> None:
        """Run the forward, as a function of buffers on the device."""
        slot_B, token_BT, position_BT = self._given[rows, width].split([1, width, width], 1)
        prefill(self.work, TokenBatch(token_BT, position_BT, slot_B[:, 0], cells), choice, mixing)


def cut_into_buckets(
    slots: Sequence[int], token_BT: Tensor, position_BT: Tensor, fewer: bool = False
) -> list[PromptRows]:
    """Cut a left-padded pass into parts of few shapes, or still fewer. Padding has tokens of its own row."""
    parts, first = [], 0
    counts = (position_BT >= 0).sum(1).tolist()
    for own, rows in split_rows(len(slots)):
        at_B = torch.arange(first, first + rows).clamp_max(first + own - 1)  # the last one again and again
        count = max(counts[first : first + own])
        width = bucket(count, fewer)
        given_BX = torch.full((rows, 1 + 2 * width), -1)
        given_BX[:, 0] = torch.tensor(slots)[at_B]
        given_BX[:, 1 : 1 + width] = token_BT[at_B, -1:]
        given_BX[:, 1 + width - count : 1 + width] = token_BT[at_B, -count:]
        given_BX[:, 1 + 2 * width - count :] = position_BT[at_B, -count:]
        parts.append(PromptRows(given_BX, int(position_BT[at_B].max()) + 1))
        first += own
    return parts


def padding_rows(rows: int, length: int, fewer: bool = False) -> PromptRows:
    """Make rows for prompts of that length, of padding alone, all of it for the first slot."""
    width = bucket(length, fewer)
    given_BX = torch.zeros(rows, 1 + 2 * width, dtype=torch.long)
    given_BX[:, 1 + width :] = -1
    return PromptRows(given_BX, length)


def grid(rows: Sequence[int], context: int) -> Iterator[PromptRows]:
    """Make rows of padding in the fewest buckets that serve all short prompts."""
    for width in sorted({bucket(length, fewer=True) for length in range(1, min(context, MOST_TOKENS) + 1)}):
        yield from (padding_rows(count, min(width, context), fewer=True) for count in rows)


def split_rows(rows: int) -> list[tuple[int, int]]:
    """Split rows into parts: (rows taken, rows of the bucket), powers of two, up to a quarter of them padding."""
    power = 1 << (rows - 1).bit_length()
    if 3 * power <= 4 * rows:
        return [(rows, power)]
    return [(power // 2, power // 2), *split_rows(rows - power // 2)]


def bucket(width: int, fewer: bool = False) -> int:
    """Round up to a power of two or three quarters of one unless buckets shall be fewer; less than half is padding."""
    power = 1 << (max(width, NARROWEST) - 1).bit_length()
    return power * 3 // 4 if not fewer and max(width, NARROWEST) <= power * 3 // 4 else power
