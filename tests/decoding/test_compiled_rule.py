"""Compiled rules say what the rules say, whatever shapes come; traced here as on a GPU, without making kernels."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from tessellm.decoding import compiled_rule
from tessellm.decoding.compiled_rule import CompiledRule, PlainRule
from tessellm.evidence import Evidence
from tessellm.rules import Product, normalised
from tessellm.termination import Terminated

VOCABULARY = 40


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The compiler, stopped before it makes kernels; every function that it was given."""
    given: list[Any] = []
    plain = torch.compile

    def tracing(function: Any, **settings: Any) -> Any:
        given.append(function)
        return plain(function, backend="eager", **settings)

    monkeypatch.setattr(compiled_rule.torch, "compile", tracing)
    compiled_rule._shared.cache_clear()
    yield given
    compiled_rule._shared.cache_clear()
    torch._dynamo.reset()


def inputs(rows: int, tokens: int, seed: int) -> tuple[list[Any], Any, Any]:
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(seed))
    logits_M = [3 * draw(rows, tokens, VOCABULARY) for _ in range(3)]
    token_BT = torch.arange(rows * tokens).view(rows, tokens) * 7 % VOCABULARY
    return logits_M, token_BT, torch.arange(tokens) <= torch.arange(rows)[:, None]


@pytest.mark.parametrize("rule", [Terminated(Evidence(window=8), ((1,), (1, 2), (1,))), Product((0.5, 2.0))])
@torch.inference_mode()
def test_the_same_in_every_shape(rule: Any, traced: list[Any]) -> None:
    plain, compiled = PlainRule(rule), CompiledRule(rule)
    for rows in (2, 4):
        logits_M, token_BT, mask_BT = inputs(rows, 5, seed=rows)
        state = plain.combine(logits_M, token_BT, mask_BT, None)[1]
        for tokens in (1, 5):
            logits_M, token_BT, mask_BT = inputs(rows, tokens, seed=10 * rows + tokens)
            given = token_BT, mask_BT, state
            if tokens == 1:
                close(compiled.combine(logits_M, *given), plain.combine(logits_M, *given))
            logp_MBTV = normalised(logits_M)
            if tokens > 1:
                close(compiled.say(logp_MBTV, *given), plain.say(logp_MBTV, *given))
                close(compiled.observe(logp_MBTV, *given), plain.observe(logp_MBTV, *given))
    assert len(traced) == 4  # a step for each number of rows, and one for all drafts each
    CompiledRule(rule).say(logp_MBTV, *given)
    assert len(traced) == 4


def close(found: Any, expected: Any) -> None:
    if isinstance(expected, tuple):
        for one, other in zip(found, expected, strict=True):
            close(one, other)
    elif expected is not None:
        torch.testing.assert_close(found, expected)
