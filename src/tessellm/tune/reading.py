"""Development texts read by the members, some positions at a time: log-probabilities of no more than those are held.

Every text is read once, for the rows that the rule needs: those that predict counted tokens, and as many before them
as the rule looks back. Knows no weights.

Shapes: M members, T rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..model import ComposedForCausalLM
from ..model.rows import slices
from ..rules import normalised
from .sparse_rows import NamedColumns, SparseText, keep_columns
from .texts import DevelopmentText

READ_AT_ONCE = 1 << 24  # log-probabilities of all members: 64 MiB, of which a rule makes some dozens


class ReadRows(NamedTuple):
    """Some rows of a text: what was fed, what came next, whether that counts."""

    logp_MTV: Tensor
    token_T: Tensor
    next_T: Tensor
    counts_T: Tensor


def first_row(model: ComposedForCausalLM, text: DevelopmentText) -> int:
    """The first position whose row the rule needs."""
    return model.rule.reads_from(text.ids, text.start - 1)


@torch.no_grad()
def read(model: ComposedForCausalLM, text: DevelopmentText) -> Iterator[ReadRows]:
    """Feed a text to the members and yield its rows from the first that the rule needs; the last token predicts
    nothing that is known."""
    ids_T = torch.tensor(text.ids, device=model.device)
    first, caches = first_row(model, text), model.new_cache().caches
    if first:
        for name, cache in zip(model.members, caches, strict=True):
            model.member_logits(name, ids_T[None, :first], cache, 1, {})
    numbers = len(model.members) * model.config.vocab_size
    for start, stop in slices(len(ids_T) - 1 - first, numbers, READ_AT_ONCE):
        at = slice(first + start, first + stop)
        logits_M = [
            model.member_logits(name, ids_T[None, at], cache, 0, {})[0]
            for name, cache in zip(model.members, caches, strict=True)
        ]
        next_T = ids_T[first + start + 1 : first + stop + 1]
        place_T = torch.arange(first + start + 1, first + stop + 1, device=model.device)
        yield ReadRows(normalised(logits_M), ids_T[at], next_T, place_T >= text.start)


def sparse(
    model: ComposedForCausalLM, text: DevelopmentText, labels: NamedColumns, generator: torch.Generator
) -> SparseText:
    """Read a text and keep of its rows what the likelihood of weights needs."""
    keeper = Keeper(model, text, labels, generator)
    for rows in read(model, text):
        keeper.add(rows)
    return keeper.text()


class Keeper:
    """Collects the rows of one text, sparse."""

    def __init__(
        self, model: ComposedForCausalLM, text: DevelopmentText, labels: NamedColumns, generator: torch.Generator
    ) -> None:
        own = labels.own(text.ids[first_row(model, text) :])
        self.own_D = torch.tensor(own, device=model.device)
        self._column = torch.zeros(labels.vocabulary, dtype=torch.long, device=model.device)
        self._column[self.own_D] = torch.arange(len(own), device=model.device)
        self._whole, self._generator = labels.whole, generator
        self._parts: list[ReadRows] = []

    def add(self, rows: ReadRows) -> None:
        kept_MTC = keep_columns(rows.logp_MTV, self.own_D, self._generator, self._whole)
        self._parts.append(ReadRows(kept_MTC, self._column[rows.token_T], self._column[rows.next_T], rows.counts_T))

    def text(self) -> SparseText:
        laws, *lines = zip(*self._parts, strict=True)
        token_T, next_T, counts_T = (torch.cat(line) for line in lines)
        return SparseText(torch.cat(laws, 1), token_T, next_T, counts_T, len(self.own_D))
