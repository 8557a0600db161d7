"""Weights from development texts, by likelihood: those under which the composition is least surprised by the texts.

Every text is read once by the members. Of texts to learn from sparse rows are kept, KEPT_BYTES of them at most, and
the weights climb on those; if more is given, texts are drawn from every skill alike. Texts held out, drawn by a seed,
then judge the weights found on their whole rows, against the weights there were and equal ones: what is worse than any
of them is not kept.

For `product` the log-likelihood is concave in the weights, so what is found is the best. For other rules it is a
local optimum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import PromptError
from ..model import ComposedForCausalLM
from ..rules import ComposedRule
from .judging import Judgement, judge
from .reading import first_row, sparse
from .sparse_rows import NamedColumns, SparseText, batches
from .texts import DevelopmentText, draw, hold_out

KEPT_BYTES = 1 << 29  # of sparse rows: about 100,000 tokens of three experts
STEPS = 40  # of the climb at most; each reads the rows once or twice

Progress = Callable[[str, int, int], None]  # what is done, how much of it, of how much
Weights = tuple[float, ...]
FOUND, BEFORE, ONES, SHARES = "found", "before", "1 each", "1/k each"


@dataclass(frozen=True)
class Tuning:
    """What tuning found. Likelihoods are natural logarithms per token."""

    weights: dict[str, float]  # those to keep
    kept: str  # which they are: found, before, or equal ones (1 each, 1/k each)
    candidates: dict[str, dict[str, float]]  # all that were judged, by what they are
    before: float  # on the texts that were learnt from, by sparse rows
    after: float
    held_out_before: float | None  # by whole rows
    held_out_after: float | None
    texts: int
    tokens: int
    held_out_tokens: int
    texts_too_short: int
    texts_not_drawn: int  # past KEPT_BYTES
    judgement: Judgement | None  # all that the texts held out say


def tune(
    model: ComposedForCausalLM,
    texts: Sequence[DevelopmentText],
    held_out: float = 0.25,
    seed: int = 0,
    progress: Progress = lambda what, done, total: None,
) -> Tuning:
    """Find the likeliest weights on the texts; a share of every skill's texts, drawn by the seed, judges them."""
    long_enough = [text for text in texts if text.counted]
    if not long_enough:
        raise PromptError("tuning needs texts of at least two tokens; none was given")
    learnt, judges = hold_out(long_enough, held_out, seed)
    labels = NamedColumns.of(model.rule, model.config.vocab_size)
    drawn = draw(learnt, lambda text: kept_bytes(model, text, labels), KEPT_BYTES, seed)
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number, text in enumerate(drawn, 1):
        rows.append(sparse(model, text, labels, generator))
        progress("reading", number, len(drawn))
    objective = Objective(labels.rule(model.rule), rows)
    candidates = plain_weights(model)
    start = max(candidates.values(), key=objective.value)
    candidates = {FOUND: climb(objective, start, progress), **candidates}
    judged = judge(model, judges, candidates, labels, progress) if judges else None
    score = judged.mean if judged else lambda name: objective.value(candidates[name])
    kept = max(candidates, key=score)  # the weights found, where others are no better
    names = model.config.member_names[1:]
    by_name = {key: dict(zip(names, weights, strict=True)) for key, weights in candidates.items()}
    return Tuning(
        weights=by_name[kept],
        kept=kept,
        candidates=by_name,
        before=objective.value(candidates[BEFORE]),
        after=objective.value(candidates[kept]),
        held_out_before=judged.mean(BEFORE) if judged else None,
        held_out_after=judged.mean(kept) if judged else None,
        texts=len(drawn),
        tokens=objective.tokens,
        held_out_tokens=sum(text.counted for text in judges),
        texts_too_short=len(texts) - len(long_enough),
        texts_not_drawn=len(learnt) - len(drawn),
        judgement=judged,
    )


def plain_weights(model: ComposedForCausalLM) -> dict[str, Weights]:
    """The weights that those found must not be worse than: the model's own, 1 each (Eq. 2), 1/k each (their mean)."""
    count = len(model.members) - 1
    return {BEFORE: tuple(model.config.weights), ONES: (1.0,) * count, SHARES: (1 / count,) * count}


def kept_bytes(model: ComposedForCausalLM, text: DevelopmentText, labels: NamedColumns) -> int:
    """Bound what sparse rows of a text take."""
    rows = len(text.ids) - first_row(model, text)
    return 4 * len(model.members) * rows * labels.columns(rows)


class Objective:
    """The log-likelihood per token of sparse rows under a rule, as a function of the weights."""

    def __init__(self, rule: ComposedRule, texts: Sequence[SparseText]) -> None:
        self.rule, self._texts = rule, texts
        self.tokens = sum(text.counted for text in texts)

    @torch.no_grad()
    def value(self, weights: Weights) -> float:
        return sum(part.item() for part in self._parts(torch.tensor(weights)))

    def descend(self, weights_K: Tensor) -> float:
        """Return the negative of the value, and add its gradient to the weights', a batch at a time."""
        total = 0.0
        for part in self._parts(weights_K):
            (-part).backward()
            total -= part.item()
        return total

    def _parts(self, weights_K: Tensor) -> Iterator[Tensor]:
        rule = self.rule.weighted(weights_K)
        for batch in batches(self._texts):
            yield batch.log_likelihood(rule) / self.tokens


def climb(objective: Objective, start: Weights, progress: Progress) -> Weights:
    """Go uphill from the start (L-BFGS), and return the best weights met: a rule whose likelihood is not smooth can
    lead astray, or to NaN."""
    weights_K = torch.tensor(start).requires_grad_()
    optimiser = torch.optim.LBFGS(
        [weights_K], max_iter=STEPS, tolerance_grad=1e-5, tolerance_change=1e-6, line_search_fn="strong_wolfe"
    )
    best, least, calls = start, -objective.value(start), 0

    def closure() -> Tensor:
        nonlocal best, least, calls
        optimiser.zero_grad()
        loss = objective.descend(weights_K)
        if loss < least:
            best, least = tuple(weights_K.tolist()), loss
        calls += 1
        progress("climbing", min(calls, STEPS), STEPS)
        return torch.tensor(loss)

    with torch.enable_grad():
        optimiser.step(closure)
    progress("climbing", STEPS, STEPS)
    return best
