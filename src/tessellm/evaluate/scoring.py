"""Log-likelihoods of continuations, by the reference model. Token ids only; knows nothing of tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch

from ..errors import PromptError
from ..model import ComposedForCausalLM
from ..text.reference import left_padded

LOGITS = 1 << 28  # log-probabilities that one batch may hold


class ContinuationScore(NamedTuple):
    """A continuation's log-likelihood, and whether greedy decoding would have written it."""

    logprob: float
    is_greedy: bool


class _Input(NamedTuple):
    """Tokens that are fed once for all continuations that need them."""

    fed: tuple[int, ...]
    wanted: list[int]  # which pairs
    keep: int  # of how many last tokens the predictions are needed


def score(
    model: ComposedForCausalLM,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    batch_size: int = 8,
    progress: Callable[[int], None] = lambda done: None,
) -> list[ContinuationScore]:
    """Of each continuation after its context. What is longer than the members' context loses its beginning."""
    scores: list[ContinuationScore | None] = [None] * len(pairs)
    inputs = _inputs(pairs, model.config.max_position_embeddings)
    while inputs:
        batch = inputs[: _rows_that_fit(inputs, model.config.vocab_size, batch_size)]
        inputs = inputs[len(batch) :]
        for row, logp_TV in zip(batch, _predictions(model, batch), strict=True):
            for number in row.wanted:
                scores[number] = _scored(logp_TV, pairs[number][1])
            progress(len(row.wanted))
    return cast(list[ContinuationScore], scores)


def _inputs(pairs: Sequence[tuple[Sequence[int], Sequence[int]]], limit: int) -> list[_Input]:
    """What has to be fed, longest first: continuations that differ in their last token alone share it."""
    rows: dict[tuple[int, ...], _Input] = {}
    for number, (context, continuation) in enumerate(pairs):
        if not context or not continuation:
            raise PromptError("expected a context and a continuation of at least one token each; one is empty")
        if limit and len(continuation) > limit:
            raise PromptError(f"a continuation of {len(continuation)} tokens is longer than the context, {limit}")
        fed = (*context, *continuation)[:-1]
        fed = fed[-limit:] if limit else fed
        before = rows.get(fed, _Input(fed, [], 0))
        rows[fed] = _Input(fed, [*before.wanted, number], max(before.keep, len(continuation)))
    return sorted(rows.values(), key=lambda row: -len(row.fed))


def _rows_that_fit(inputs: Sequence[_Input], vocab_size: int, most: int) -> int:
    keep = 0
    for count, row in enumerate(inputs[:most], 1):
        keep = max(keep, row.keep)
        if count > 1 and count * keep * vocab_size > LOGITS:
            return count - 1
    return min(most, len(inputs))


@torch.no_grad()
def _predictions(model: ComposedForCausalLM, batch: Sequence[_Input]) -> torch.Tensor:
    """Composed log-probabilities of the last tokens of every row; rows end together: [B, keep, V]."""
    ids_BT, mask_BT = left_padded([row.fed for row in batch], model)
    call: Any = model
    output = call(
        ids_BT,
        attention_mask=mask_BT,
        position_ids=(mask_BT.cumsum(-1) - 1).clamp_min(0),
        use_cache=False,
        logits_to_keep=max(row.keep for row in batch),
    )
    return output.logits


def _scored(logp_TV: torch.Tensor, continuation: Sequence[int]) -> ContinuationScore:
    rows_TV = logp_TV[-len(continuation) :]
    came_T = torch.tensor(list(continuation), device=logp_TV.device)
    logp_T = rows_TV.gather(-1, came_T[:, None])[:, 0]
    return ContinuationScore(logp_T.sum().item(), bool((rows_TV.argmax(-1) == came_T).all()))
