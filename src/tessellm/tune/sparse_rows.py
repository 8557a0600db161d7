"""Rows of log-probabilities over a real vocabulary, kept small: what the likelihood of weights needs of them.

Of every row are kept the columns of the text's own tokens and of the tokens that the rule names (ends, a template's),
the TOP likeliest others, and DRAWN more, drawn in proportion to how likely they are and lifted by one over their
chance. A lift is the same for all members, whose counts add up to one in Eq. 2, so that every sum over the vocabulary
of the form Σ_v Π_m p_m(v)^c_m, Σ c = 1, is estimated without bias, whatever the weights. A rule runs on such rows as it
does on whole ones; token ids become numbers of columns. A vocabulary of at most WHOLE tokens is kept as it is.

Shapes: M members, B texts, T rows, V vocabulary, C columns kept, D of them the text's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from ..model.rows import slices
from ..rules import ComposedRule
from ..rules.base import rename_tokens
from ..rules.equation import LOG_FLOOR, product_scores

TOP, DRAWN = 64, 128
WHOLE = 512
BATCH_NUMBERS = 1 << 21  # log-probabilities that a rule reads at once; it makes some dozens of tensors of that size


@dataclass(frozen=True)
class NamedColumns:
    """Tokens that the rule names, which have the first columns of every text, and whether all tokens have."""

    named: tuple[int, ...]
    vocabulary: int

    @classmethod
    def of(cls, rule: ComposedRule, vocabulary: int) -> NamedColumns:
        if vocabulary <= WHOLE:
            return cls(tuple(range(vocabulary)), vocabulary)
        return cls(tuple(sorted(rule.named_tokens)), vocabulary)

    @property
    def whole(self) -> bool:
        return len(self.named) == self.vocabulary

    def rule(self, rule: ComposedRule) -> ComposedRule:
        """Make the rule that reads columns where the given one reads token ids."""
        column = {token: number for number, token in enumerate(self.named)}
        stops = tuple(tuple(column[token] for token in ids) for ids in rule.stops)
        return ComposedRule(rename_tokens(rule.rule, column), None, stops, rule.policy)

    def own(self, ids: Sequence[int]) -> list[int]:
        """List the tokens of a text's own columns, in order."""
        return [*self.named, *sorted(set(ids) - set(self.named))]

    def columns(self, text: int) -> int:
        """Bound the columns kept of a text of so many tokens."""
        return self.vocabulary if self.whole else len(self.named) + text + TOP + DRAWN


@dataclass(frozen=True)
class SparseText:
    """The rows of one text. `token` and `next` are columns: what was fed at a row, and what came after it."""

    logp_MTC: Tensor
    token_T: Tensor
    next_T: Tensor
    counts_T: Tensor  # whether the token that came counts
    own: int  # the first D columns are the text's own

    @property
    def counted(self) -> int:
        return int(self.counts_T.sum())


def keep_columns(logp_MTV: Tensor, own_D: Tensor, generator: torch.Generator, whole: bool) -> Tensor:
    """Keep the columns of rows that matter: [M, T, C], each row a distribution."""
    logp_MTV = logp_MTV.clamp_min(LOG_FLOOR)  # finite, so that gradients are
    if whole:
        return logp_MTV
    score_TV = product_scores(logp_MTV)
    likely_TV = torch.maximum(logp_MTV.amax(0), score_TV - score_TV.logsumexp(-1, keepdim=True))
    likely_TV.index_fill_(-1, own_D, -torch.inf)
    top_TN = likely_TV.topk(min(TOP, likely_TV.shape[-1] - len(own_D)), -1).indices
    size_TV = likely_TV.scatter_(-1, top_TN, -torch.inf).exp_()
    drawn_TN, lift_TN = _drawn(size_TV, generator)
    column_TC = torch.cat([own_D.expand(len(top_TN), -1), top_TN, drawn_TN], -1)
    kept_MTC = logp_MTV.gather(-1, column_TC.expand(len(logp_MTV), -1, -1))
    kept_MTC[..., -DRAWN:] += lift_TN
    return kept_MTC.log_softmax(-1)


def _drawn(size_TV: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw columns in proportion to their sizes, evenly spaced, and say how much each stands for (log)."""
    upto_TV = size_TV.cumsum(-1, dtype=torch.float64)
    total_T1 = upto_TV[:, -1:]
    shift_T1 = torch.rand(len(size_TV), 1, generator=generator, dtype=torch.float64).to(size_TV.device)
    point_TN = (torch.arange(DRAWN, device=size_TV.device) + shift_T1) / DRAWN * total_T1
    drawn_TN = torch.searchsorted(upto_TV, point_TN, right=True).clamp_max(size_TV.shape[-1] - 1)
    size_TN = size_TV.gather(-1, drawn_TN)
    lift_TN = (total_T1 / (DRAWN * size_TN)).log().to(size_TV.dtype)
    return drawn_TN, torch.where(size_TN > 0, lift_TN, LOG_FLOOR)


@dataclass(frozen=True)
class SparseBatch:
    """Texts padded to one shape: rows behind, columns between a text's own and the others, impossible to all."""

    logp_MBTC: Tensor
    token_BT: Tensor
    next_BT: Tensor
    counts_BT: Tensor
    real_BT: Tensor

    def log_likelihood(self, rule: ComposedRule) -> Tensor:
        """Sum the log-probabilities of all tokens that count. Of a long text no more than a block's intermediate
        results are kept for the gradient: the others are computed again."""
        members, texts, rows, columns = self.logp_MBTC.shape
        spans = list(slices(rows, members * texts * columns, BATCH_NUMBERS))
        total, state = torch.zeros((), dtype=torch.float64, device=self.logp_MBTC.device), None
        for start, stop in spans:
            if len(spans) > 1 and torch.is_grad_enabled():
                said, state = checkpoint(self._block, rule, start, stop, state, use_reentrant=False)
            else:
                said, state = self._block(rule, start, stop, state)
            total = total + said
        return total

    def _block(self, rule: ComposedRule, start: int, stop: int, state: Any) -> tuple[Tensor, Any]:
        at = slice(start, stop)
        logp_BTC, state = rule(self.logp_MBTC[:, :, at], self.token_BT[:, at], self.real_BT[:, at], state)
        said_BT = logp_BTC.gather(-1, self.next_BT[:, at, None])[..., 0].clamp_min(LOG_FLOOR)
        return said_BT.masked_fill(~self.counts_BT[:, at], 0.0).double().sum(), state


def batches(texts: Sequence[SparseText]) -> Iterator[SparseBatch]:
    """Put texts of like lengths together, as many as BATCH_NUMBERS allow, but one at the least."""
    batch: list[SparseText] = []
    for text in sorted(texts, key=lambda text: len(text.token_T), reverse=True):
        if batch and _size([*batch, text]) > BATCH_NUMBERS:
            yield _padded(batch)
            batch = []
        batch.append(text)
    if batch:
        yield _padded(batch)


def _size(texts: Sequence[SparseText]) -> int:
    """Count the numbers of a batch: all texts have as many rows, and as many columns, as the one with most."""
    rows = max(len(text.token_T) for text in texts)
    return len(texts[0].logp_MTC) * len(texts) * rows * max(text.logp_MTC.shape[-1] for text in texts)


def _padded(texts: Sequence[SparseText]) -> SparseBatch:
    rows, own = max(len(text.token_T) for text in texts), max(text.own for text in texts)
    laws = [_pad_law(text, rows, own) for text in texts]
    lines = ((text.token_T, text.next_T, text.counts_T, torch.ones_like(text.counts_T)) for text in texts)
    padded = [[pad(each, (0, rows - len(each))) for each in line] for line in lines]
    return SparseBatch(torch.stack(laws, 1), *(torch.stack(column) for column in zip(*padded, strict=True)))


def _pad_law(text: SparseText, rows: int, own: int) -> Tensor:
    own_MTD, others_MTC = text.logp_MTC.split([text.own, text.logp_MTC.shape[-1] - text.own], -1)
    law_MTC = torch.cat([pad(own_MTD, (0, own - text.own), value=LOG_FLOOR), others_MTC], -1)
    return torch.cat([law_MTC, law_MTC[:, -1:].expand(-1, rows - law_MTC.shape[1], -1)], 1)
