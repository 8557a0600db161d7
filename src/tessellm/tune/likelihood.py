"""Weights of Eq. 2 from development texts, by likelihood: those under which the texts are least surprising.

Every text is read once by the members. Of texts to learn from sparse rows are kept, KEPT_BYTES of them at most, and
the weights climb on those; if more is given, texts are drawn from every skill alike. The log-likelihood is concave in
the weights, so what is found is the best. Texts held out, drawn by a seed, then judge the weights found on their whole
rows, against the weights there were and equal ones: what is worse than any of them is not kept.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import PromptError, RecipeError
from ..model import ComposedForCausalLM
from ..rules import Product
from .rows import TextRows, batches, columns_kept, read, sparse
from .texts import DevelopmentText, draw, hold_out

KEPT_BYTES = 1 << 29  # of sparse rows: about 200,000 tokens of three experts
STEPS = 40  # of the climb at most; each reads the rows once or twice

Progress = Callable[[str, int, int], None]  # what is done, how much of it, of how much
Weights = tuple[float, ...]
FOUND, BEFORE, ONES, SHARES = "found", "before", "1 each", "1/k each"


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
    check_product(model)
    long_enough = [text for text in texts if text.counted]
    if not long_enough:
        raise PromptError("tuning needs texts of at least two tokens; none was given")
    learnt, judges = hold_out(long_enough, held_out, seed)
    row_bytes = 4 * len(model.members) * columns_kept(model.config.vocab_size)
    drawn = draw(learnt, lambda text: row_bytes * text.counted, KEPT_BYTES, seed)
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number, text in enumerate(drawn, 1):
        rows += [sparse(part, generator) for part in read(model, text)]
        progress("reading", number, len(drawn))
    objective = Objective(rows)
    candidates = plain_weights(model)
    start = max(candidates.values(), key=objective.value)
    candidates = {FOUND: climb(objective, start, progress), **candidates}
    judged = judge(model, judges, candidates, progress) if judges else None
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


def check_product(model: ComposedForCausalLM) -> None:
    """Weights are those of Eq. 2: refuse a composition by another rule."""
    if model.rule.name != Product.name:
        raise RecipeError(
            f"tuning finds weights for the rule product (Eq. 2), and this composition's is {model.rule.name}. "
            "Give --rule product, which is then saved with the weights"
        )


def plain_weights(model: ComposedForCausalLM) -> dict[str, Weights]:
    """The weights that those found must not be worse than: the model's own, 1 each (Eq. 2), 1/k each (their mean)."""
    count = len(model.members) - 1
    return {BEFORE: tuple(model.config.weights), ONES: (1.0,) * count, SHARES: (1 / count,) * count}


class Objective:
    """The log-likelihood per token of sparse rows, as a function of the weights."""

    def __init__(self, rows: Sequence[TextRows]) -> None:
        self._batches = list(batches(rows))
        self.tokens = sum(len(batch.next_T) for batch in self._batches)

    @torch.no_grad()
    def value(self, weights: Weights) -> float:
        return sum(batch.log_likelihood(weights).item() for batch in self._batches) / self.tokens

    def descend(self, weights_K: Tensor) -> float:
        """Return the negative of the value, and add its gradient to the weights', a batch at a time."""
        total = 0.0
        for batch in self._batches:
            loss = -batch.log_likelihood(weights_K) / self.tokens
            loss.backward()
            total += loss.item()
        return total


def climb(objective: Objective, start: Weights, progress: Progress) -> Weights:
    """Go uphill from the start (L-BFGS), and return the best weights met."""
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


@torch.no_grad()
def judge(
    model: ComposedForCausalLM,
    texts: Sequence[DevelopmentText],
    candidates: Mapping[str, Weights],
    progress: Progress,
) -> Judgement:
    """Read each text once, by whole rows, under every candidate's weights; under the first one's by sparse rows too."""
    sums: dict[str, dict[str, float]] = {name: defaultdict(float) for name in candidates}
    first, generator, by_sparse = next(iter(candidates)), torch.Generator().manual_seed(0), 0.0
    tokens: Counter[str] = Counter()
    for number, text in enumerate(texts, 1):
        for rows in read(model, text):
            for name, weights in candidates.items():
                sums[name][text.skill] += rows.log_likelihood(weights).item()
            by_sparse += sparse(rows, generator).log_likelihood(candidates[first]).item()
        tokens[text.skill] += text.counted
        progress("judging", number, len(texts))
    error = (by_sparse - sum(sums[first].values())) / sum(tokens.values())
    return Judgement({name: dict(by_skill) for name, by_skill in sums.items()}, dict(tokens), len(texts), error)
