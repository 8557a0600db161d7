"""Texts held out judge weights: on whole rows, as the composition itself would read them. Knows no search.

Shapes: M members, T rows, V vocabulary.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..model import ComposedForCausalLM
from ..rules import ComposedRule
from ..rules.equation import LOG_FLOOR
from .reading import Keeper, ReadRows, read
from .sparse_rows import NamedColumns, batches
from .texts import DevelopmentText


@dataclass(frozen=True)
class Judgement:
    """Log-likelihoods of texts held out, summed by candidate and skill, and how far sparse rows are off."""

    sums: dict[str, dict[str, float]]
    tokens: dict[str, int]  # by skill
    texts: int
    sparse_error: float  # nats per token: sparse rows less whole ones, under the first candidate

    def mean(self, name: str) -> float:
        """Nats per token of all texts."""
        return sum(self.sums[name].values()) / sum(self.tokens.values())

    def by_skill(self, name: str) -> dict[str, float]:
        """Nats per token of each skill's texts."""
        return {skill: total / self.tokens[skill] for skill, total in self.sums[name].items()}


@torch.no_grad()
def judge(
    model: ComposedForCausalLM,
    texts: Sequence[DevelopmentText],
    candidates: Mapping[str, tuple[float, ...]],
    labels: NamedColumns,
    progress: Callable[[str, int, int], None],
) -> Judgement:
    """Read each text once, under every candidate's weights; under the first one's by sparse rows too."""
    sums: dict[str, dict[str, float]] = {name: defaultdict(float) for name in candidates}
    first = labels.rule(model.rule).weighted(next(iter(candidates.values())))
    generator, by_sparse = torch.Generator().manual_seed(0), 0.0
    tokens: Counter[str] = Counter()
    for number, text in enumerate(texts, 1):
        readers = {weights: _Reader(model.rule.weighted(weights)) for weights in set(candidates.values())}
        keeper = Keeper(model, text, labels, generator)
        for rows in read(model, text):
            keeper.add(rows)
            for reader in readers.values():
                reader.add(rows)
        by_sparse += sum(float(batch.log_likelihood(first)) for batch in batches([keeper.text()]))
        tokens[text.skill] += text.counted
        for name, weights in candidates.items():
            sums[name][text.skill] += readers[weights].total
        progress("judging", number, len(texts))
    off = (by_sparse - sum(next(iter(sums.values())).values())) / sum(tokens.values())
    return Judgement({name: dict(each) for name, each in sums.items()}, dict(tokens), len(texts), off)


class _Reader:
    """Adds up the log-likelihood of a text under one rule, block by block."""

    def __init__(self, rule: ComposedRule) -> None:
        self.rule, self.total = rule, 0.0
        self.state: Any = None

    def add(self, rows: ReadRows) -> None:
        real_1T = torch.ones_like(rows.counts_T)[None]
        logp_1TV, self.state = self.rule(rows.logp_MTV[:, None], rows.token_T[None], real_1T, self.state)
        said_T: Tensor = logp_1TV[0].gather(-1, rows.next_T[:, None])[:, 0].clamp_min(LOG_FLOOR)
        self.total += float(said_T[rows.counts_T].double().sum())
