"""TextRows of log-probabilities that predict the tokens of development texts: read from the members, and kept small.

Of every row are kept the column of the token that came, the TOP likeliest others, and DRAWN more, drawn in proportion
to how likely they are and lifted by one over their chance. A lift is the same for all members, whose counts add up to
one in Eq. 2, so that every sum over the vocabulary of the form Σ_v Π_m p_m(v)^c_m, Σ c = 1, is estimated without bias,
whatever the weights. A vocabulary of at most WHOLE tokens is kept as it is.

Shapes: M members, T rows, V vocabulary, C columns kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..model import ComposedForCausalLM
from ..model.rows import slices
from ..rules import normalised, product, product_scores
from ..rules.equation import LOG_FLOOR
from .texts import DevelopmentText

TOP, DRAWN = 64, 128
WHOLE = 512
READ_AT_ONCE = 1 << 24  # log-probabilities of all members: 64 MiB
BATCH_NUMBERS = 1 << 21  # of sparse rows that Eq. 2 reads at once


class TextRows(NamedTuple):
    """Log-probabilities of all members, and the column of the token that came."""

    logp_MTC: Tensor
    next_T: Tensor

    def log_likelihood(self, weights_K: Sequence[float] | Tensor) -> Tensor:
        """Sum the log-probabilities of the tokens that came, by Eq. 2 with these weights."""
        logp_T = product(self.logp_MTC, weights_K).gather(-1, self.next_T[:, None])[:, 0]
        return logp_T.clamp_min(LOG_FLOOR).double().sum()


@torch.no_grad()
def read(model: ComposedForCausalLM, text: DevelopmentText) -> Iterator[TextRows]:
    """Feed a text to the members and yield the whole rows of its counted tokens, READ_AT_ONCE numbers at a time."""
    ids_T = torch.tensor(text.ids, device=model.device)
    first, caches = text.start - 1, model.new_cache().caches
    if first:
        for name, cache in zip(model.members, caches, strict=True):
            model.member_logits(name, ids_T[None, :first], cache, 1, {})
    for start, stop in slices(text.counted, len(model.members) * model.config.vocab_size, READ_AT_ONCE):
        at = slice(first + start, first + stop)
        logits_M = [
            model.member_logits(name, ids_T[None, at], cache, 0, {})[0]
            for name, cache in zip(model.members, caches, strict=True)
        ]
        yield TextRows(normalised(logits_M), ids_T[first + start + 1 : first + stop + 1])


def sparse(rows: TextRows, generator: torch.Generator) -> TextRows:
    """Keep the columns that matter, each row a distribution."""
    logp_MTV = rows.logp_MTC.clamp_min(LOG_FLOOR)  # finite, so that gradients are
    if logp_MTV.shape[-1] <= WHOLE:
        return TextRows(logp_MTV, rows.next_T)
    next_T1, score_TV = rows.next_T[:, None], product_scores(logp_MTV)
    likely_TV = torch.maximum(logp_MTV.amax(0), score_TV - score_TV.logsumexp(-1, keepdim=True))
    likely_TV.scatter_(-1, next_T1, -torch.inf)
    top_TN = likely_TV.topk(TOP, -1).indices
    size_TV = likely_TV.scatter_(-1, top_TN, -torch.inf).exp_()
    drawn_TN, lift_TN = _drawn(size_TV, generator)
    column_TC = torch.cat([next_T1, top_TN, drawn_TN], -1)
    kept_MTC = logp_MTV.gather(-1, column_TC.expand(len(logp_MTV), -1, -1))
    kept_MTC[..., -DRAWN:] += lift_TN
    return TextRows(kept_MTC.log_softmax(-1), torch.zeros_like(rows.next_T))


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


def columns_kept(vocabulary: int) -> int:
    """How many columns `sparse` keeps of a row."""
    return vocabulary if vocabulary <= WHOLE else 1 + TOP + DRAWN


def batches(parts: Iterable[TextRows]) -> Iterator[TextRows]:
    """Join rows, BATCH_NUMBERS at a time at most, but one part at the least."""
    batch: list[TextRows] = []
    for part in parts:
        if batch and sum(each.logp_MTC.numel() for each in (*batch, part)) > BATCH_NUMBERS:
            yield _joined(batch)
            batch = []
        batch.append(part)
    if batch:
        yield _joined(batch)


def _joined(batch: Sequence[TextRows]) -> TextRows:
    return TextRows(torch.cat([each.logp_MTC for each in batch], 1), torch.cat([each.next_T for each in batch]))
