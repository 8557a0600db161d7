"""Cut passes over short prompts, and over short pieces of long ones, into few shapes, so that they can be graphs: their
kernels take longer to start than to run.

Rows come in powers of two (some twice, if need be), widths and cells in buckets, padded on the left. A shape is run as
it is when it first comes, since many come once, and is captured when it comes again.

Shapes: B rows, T tokens of the widest row, X = 1 + 2 · width numbers per row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from ..buffers import PromptRead, TokenBatch
from ..passes import Workspace, prefill
from ..prompt_pace import LEAST_ON_GPU
from ..sampling import TokenChoice

MOST_TOKENS = 1024  # padded tokens of a pass; a larger one computes for as long as its kernels take to start
MOST_NUMBERS = 1 << 27  # log-probabilities that the rule reads: it makes several such tensors, which graphs keep
NARROWEST = 32
PREPARED_ENDS = (TokenChoice.GREEDY, TokenChoice.PENALISED)  # of prompts; the last does for all

PromptShape = tuple[int, int, PromptRead, int, TokenChoice]  # rows, width, what the rule reads, cells, and how the
# first new token is chosen


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

    def takes(self, part: PromptRows, reads: PromptRead) -> bool:
        """Whether a graph is worth its memory."""
        logits = self.work.row_numbers * self._kept(part.width, reads)
        return self.on and part.rows * part.width <= MOST_TOKENS and part.rows * logits <= MOST_NUMBERS

    def kinds(self, part: PromptRows) -> list[tuple[PromptRead, TokenChoice]]:
        """List how prompts of a shape are read: whole ones, several together; pieces, and the ends behind them, one by
        one. Pieces in which the rule goes on are no longer than it looks back."""
        kinds = list(product([PromptRead.BEGIN], PREPARED_ENDS))
        piece, window = part.rows == 1 and part.width >= LEAST_ON_GPU, self.work.voice.rule.window
        if piece:
            kinds.append((PromptRead.NOTHING, TokenChoice.NONE))
        if piece and window:
            kinds.append((PromptRead.BEGIN, TokenChoice.NONE))
        if part.rows == 1 and part.width <= window:
            kinds += product([PromptRead.GO_ON], (TokenChoice.NONE, *PREPARED_ENDS) if piece else PREPARED_ENDS)
        return [(reads, choice) for reads, choice in kinds if self.takes(part, reads)]

    @property
    def most_read(self) -> int:
        """Count the last positions of a pass that the rule reads in a graph, if there are so many."""
        return self.work.voice.rule.window + 1

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

    def feed(self, rows: int, width: int, reads: PromptRead, cells: int, choice: TokenChoice) -> None:
        """Run the pass, as a function of buffers on the device."""
        slot_B, token_BT, position_BT = self._given[rows, width].split([1, width, width], 1)
        keep = self._kept(width, reads)
        prefill(self.work, TokenBatch(token_BT, position_BT, slot_B[:, 0], cells, keep, reads=reads), choice)

    def _kept(self, width: int, reads: PromptRead) -> int:
        """Count the last positions of a pass whose logits are computed: as many as the rule may look back."""
        return 1 if reads is PromptRead.NOTHING else min(width, self.most_read)


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
