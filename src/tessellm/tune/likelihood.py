"""Weights from a development set, by likelihood: those under which the composition is least surprised by its texts.

For `product` the log-likelihood is concave in the weights, so what is found is the best. For other rules it is a
local optimum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import PromptError
from ..model import ComposedForCausalLM
from ..rules import ComposedRule

CACHED_BYTES = 1 << 31  # log-probabilities kept in memory while tuning


@dataclass(frozen=True)
class Tuning:
    """What tuning found. Likelihoods are natural logarithms a token."""

    weights: dict[str, float]
    before: float
    after: float
    held_out_before: float | None
    held_out_after: float | None
    tokens: int
    held_out_tokens: int
    texts_left_out: int  # too short, or past what fits into memory


@dataclass(frozen=True)
class _Scored:
    """The members' log-probabilities on one text, and the tokens that came."""

    logp_MTV: Tensor
    tokens_T: Tensor  # as fed; token t+1 is what row t predicts
    start: int  # the first token that counts; the first of all is never predicted

    def log_likelihood(self, logp_TV: Tensor) -> Tensor:
        rows_TV, came_T = logp_TV[self.start - 1 : -1], self.tokens_T[self.start :]
        return rows_TV.gather(-1, came_T[:, None]).clamp_min(-1e4).double().sum()

    def __len__(self) -> int:
        return len(self.tokens_T) - self.start


def tune(
    model: ComposedForCausalLM,
    texts: Sequence[tuple[Sequence[int], int]],
    held_out: float = 0.25,
    steps: int = 50,
    progress: Callable[[int, int], None] | None = None,
) -> Tuning:
    """The likeliest weights on the texts; a share of the texts is held out to judge them.

    A text is its token ids and how many of them are a prompt, whose likelihood does not count.
    """
    long_enough = [(ids, max(1, prompt)) for ids, prompt in texts if len(ids) > max(1, prompt)]
    scored = _score(model, long_enough, progress)
    if not scored:
        raise PromptError("tuning needs texts of at least two tokens; none was given")
    cut = round(len(scored) * (1 - held_out)) or 1
    train, judge = scored[:cut], scored[cut:]

    def log_likelihood(weights_K: Tensor, part: list[_Scored]) -> Tensor:
        return _log_likelihood(model.rule.weighted(weights_K), part)

    start_K = torch.tensor(model.config.weights, dtype=torch.float32)
    weights_K = _climb(lambda w: log_likelihood(w, train), start_K, steps)
    with torch.no_grad():
        before, after = log_likelihood(start_K, train).item(), log_likelihood(weights_K, train).item()
        if not after >= before:  # a rule whose likelihood is not smooth can lead astray, or to NaN
            weights_K, after = start_K, before
        return Tuning(
            weights=dict(zip(model.config.member_names[1:], weights_K.tolist(), strict=True)),
            before=before,
            after=after,
            held_out_before=log_likelihood(start_K, judge).item() if judge else None,
            held_out_after=log_likelihood(weights_K, judge).item() if judge else None,
            tokens=sum(map(len, train)),
            held_out_tokens=sum(map(len, judge)),
            texts_left_out=len(texts) - len(scored),
        )


@torch.no_grad()
def _score(
    model: ComposedForCausalLM,
    texts: Sequence[tuple[Sequence[int], int]],
    progress: Callable[[int, int], None] | None,
) -> list[_Scored]:
    scored: list[_Scored] = []
    used = 0
    for number, (ids, start) in enumerate(texts):
        ids_BT = torch.tensor([list(ids)], device=model.device)
        output = model(ids_BT, output_member_logprobs=True, use_cache=False)
        part = _Scored(output.member_logprobs[:, 0].cpu(), ids_BT[0].cpu(), start)
        used += part.logp_MTV.numel() * 4
        if scored and used > CACHED_BYTES:
            break
        scored.append(part)
        if progress is not None:
            progress(number + 1, len(texts))
    return scored


def _log_likelihood(rule: ComposedRule, texts: list[_Scored]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for text in texts:
        tokens_BT = text.tokens_T[None]
        logp_BTV, _ = rule(text.logp_MTV[:, None], tokens_BT, torch.ones_like(tokens_BT, dtype=torch.bool), None)
        total = total + text.log_likelihood(logp_BTV[0])
    return total / max(1, sum(map(len, texts)))


def _climb(objective: Callable[[Tensor], Tensor], start_K: Tensor, steps: int) -> Tensor:
    weights_K = start_K.clone().requires_grad_()
    optimiser = torch.optim.LBFGS([weights_K], max_iter=steps, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = -objective(weights_K)
        loss.backward()
        return loss

    with torch.enable_grad():
        optimiser.step(closure)
    return weights_K.detach()
