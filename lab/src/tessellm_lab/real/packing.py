"""Texts of token ids packed into rows of one length, several texts per row, for training on answers alone.

Knows token ids. A text is (prompt ids, answer ids). Of every token a row holds four numbers: its id, the id that should
follow (IGNORED in prompts, at the ends of texts and in padding), which text of the row it belongs to (0: padding), and
its position in that text.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

IGNORED = -100
ID, LABEL, SEGMENT, POSITION = range(4)
OPEN = 32  # rows that still take texts; more would fill rows better and look at more rows per text
Text = tuple[Sequence[int], Sequence[int]]


def pack(texts: Sequence[Text], length: int, generator: torch.Generator) -> Tensor:
    """Rows [R, 4, length] in random order, each text whole in one row; a longer text loses its end."""
    rows: list[list[Text]] = []
    used: list[int] = []
    taking: list[int] = []
    for place in torch.randperm(len(texts), generator=generator).tolist():
        size = min(length, len(texts[place][0]) + len(texts[place][1]))
        row = next((each for each in taking if used[each] + size <= length), None)
        if row is None:
            row = len(rows)
            rows.append([])
            used.append(0)
            taking = [*taking[-OPEN + 1 :], row]
        rows[row].append(texts[place])
        used[row] += size
    packed = torch.stack([_row(row, length) for row in rows])
    return packed[torch.randperm(len(rows), generator=generator)]


def _row(texts: Sequence[Text], length: int) -> Tensor:
    row = torch.zeros(4, length, dtype=torch.int32)
    row[LABEL] = IGNORED
    at = 0
    for number, (prompt, answer) in enumerate(texts, 1):
        ids = torch.tensor([*prompt, *answer][:length], dtype=torch.int32)
        end = at + len(ids)
        row[ID, at:end] = ids
        row[LABEL, at + len(prompt) - 1 : end - 1] = ids[len(prompt) :]
        row[SEGMENT, at:end] = number
        row[POSITION, at:end] = torch.arange(len(ids))
        at = end
    return row


class Stream:
    """Endless rows of the same texts, in a new order and packing per epoch."""

    def __init__(self, texts: Sequence[Text], length: int, seed: int):
        self.texts, self.length = texts, length
        self.generator = torch.Generator().manual_seed(seed)
        self.epoch, self.at = 0, 0
        self.rows = pack(texts, length, self.generator)

    def take(self, count: int) -> Tensor:
        """The next rows, [count, 4, length]."""
        parts = []
        while count:
            if self.at == len(self.rows):
                self.rows, self.at = pack(self.texts, self.length, self.generator), 0
                self.epoch += 1
            part = self.rows[self.at : self.at + count]
            parts.append(part)
            self.at += len(part)
            count -= len(part)
        return torch.cat(parts)

    def skip(self, count: int) -> None:
        """Forget the next rows: a training that was cut off goes on behind them."""
        if count:
            self.take(count)
