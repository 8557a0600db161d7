"""Does a fast path write what the reference model would? Along its own texts: greedy tokens, and log-probabilities.

A greedy token may differ from the reference's best one only where that one is fragile: where it changes if the members'
log-probabilities move by less than a margin. Those are near ties, and the thresholds of a rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tessellm.engine.requests import Request
from tessellm.model import ComposedForCausalLM

MARGIN = 1e-4


@torch.no_grad()
def reference_rows(model: ComposedForCausalLM, request: Request) -> Tensor:
    """Log-probabilities by the reference model at each token that the request wrote, along its own text: [T, V]."""
    rows: Tensor = model(_text(model, request), use_cache=False).logits[0]
    return rows[len(request.prompt) - 1 : -1]


def disagreements(model: ComposedForCausalLM, request: Request, margin: float = MARGIN) -> list[int]:
    """Where a greedy request chose another token than the reference's best, by more than a near-tie."""
    rows = reference_rows(model, request)
    gap_T = rows.amax(-1) - _of_tokens(rows, request)
    return [t for t, gap in enumerate(gap_T.tolist()) if gap > margin]


@torch.no_grad()
def fragile(model: ComposedForCausalLM, request: Request, margin: float = MARGIN, draws: int = 8) -> Tensor:
    """Where the reference's own best token changes if members' log-probabilities move by less than the margin: [T]."""
    text = _text(model, request)
    logp_MBTV = model(text, use_cache=False, output_member_logprobs=True).member_logprobs
    generator, mask = torch.Generator(text.device).manual_seed(0), torch.ones_like(text).bool()
    best = model.rule(logp_MBTV, text, mask, None)[0].argmax(-1)
    changed = torch.zeros_like(mask)
    for _ in range(draws):
        noise = margin * (2 * torch.rand(logp_MBTV.shape, generator=generator, device=text.device) - 1)
        changed |= model.rule((logp_MBTV + noise).log_softmax(-1), text, mask, None)[0].argmax(-1) != best
    return changed[0, len(request.prompt) - 1 : -1].cpu()


def compared(model: ComposedForCausalLM, requests: Sequence[Request]) -> dict[str, Any]:
    """Greedy requests of a fast path against the reference: how many tokens differ, how far log-probabilities are."""
    wrong = excused = 0
    apart = []
    for request in requests:
        places = disagreements(model, request)
        excuse = fragile(model, request) if places else None
        excused += sum(bool(excuse[t]) for t in places) if excuse is not None else 0
        wrong += sum(not excuse[t] for t in places) if excuse is not None else 0
        said_T = torch.tensor(request.logprobs, device=model.device)
        apart.append((_of_tokens(reference_rows(model, request), request) - said_T).abs())
    apart_N = torch.cat(apart).double()
    return {
        "tokens": len(apart_N),
        "different": wrong,
        "different_where_fragile": excused,
        "logprob_largest": apart_N.max().item(),
        "logprob_mean": apart_N.mean().item(),
    }


def _text(model: ComposedForCausalLM, request: Request) -> Tensor:
    return torch.tensor([request.prompt + request.tokens], device=model.device)


def _of_tokens(rows_TV: Tensor, request: Request) -> Tensor:
    return rows_TV.gather(-1, torch.tensor(request.tokens, device=rows_TV.device)[:, None])[:, 0]
