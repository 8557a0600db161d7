"""Compiled rules say what the rules say, whatever shapes come; traced here as on a GPU, without making kernels."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

import tessellm
from draft_distribution import draft_always
from tessellm.engine.cuda import compiled_rule
from tessellm.engine.cuda.compiled_rule import best, compiled_runner, together
from tessellm.engine.cuda.passes import RuleRunner, combine, decide
from tessellm.engine.engine import Engine
from tessellm.engine.sampling import Sampling
from tessellm.engine.speculation import Speculation
from tessellm.rules import ComposedRule, Product

from captured_steps import over_slots
from conftest import build_model, perturbed
from speculation_cases import repeating

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


def plain_runner(rule: Any) -> RuleRunner:
    return RuleRunner(partial(combine, rule), partial(decide, rule), drafts_at_once=True)


def inputs(rows: int, tokens: int, seed: int, members: int = 3) -> list[Any]:
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(seed))
    return [3 * draw(rows, tokens, VOCABULARY) for _ in range(members)]


RULES = [ComposedRule(Product()), ComposedRule(Product(), (0.5, 2.0)), Product((0.5, 2.0))]


@pytest.mark.parametrize("members", [2, 3, 7])  # the sums of few members are taken one by one
@pytest.mark.parametrize("rule", RULES)
@torch.inference_mode()
def test_the_same_in_every_shape(rule: Any, members: int, traced: list[Any]) -> None:
    if members != 3:
        rule = ComposedRule(Product(), (0.5,) * (members - 1))
    plain, compiled = plain_runner(rule), compiled_runner(rule)
    for rows in (2, 4):
        logits_M = inputs(rows, 1, seed=10 * rows, members=members)
        logits_M[1][:, :, 5:9] = -torch.inf
        close(compiled.combine(logits_M), plain.combine(logits_M))
        close(compiled.decide(logits_M), plain.decide(logits_M))
    assert len(traced) == 4  # two kinds of step for each number of rows
    compiled_runner(rule).decide(logits_M)
    assert len(traced) == 4


def test_the_first_of_equals_is_the_best(traced: list[Any]) -> None:
    logp_BV = torch.full((3, 300), -5.0)
    logp_BV[0, [131, 7, 299]] = -1.0
    logp_BV[1] = -torch.inf
    logp_BV[2, 290] = torch.nan
    token_B, logprob_B = torch.compile(best, fullgraph=True)(logp_BV)
    assert token_B.tolist() == [7, 0, 290]
    torch.testing.assert_close(logprob_B, torch.tensor([-1.0, -torch.inf, torch.nan]), equal_nan=True)


def test_logits_that_lie_together_are_not_copied() -> None:
    logits_MBTV = torch.randn(3, 2, 1, VOCABULARY)
    shorter = [logits[..., :-4] for logits in logits_MBTV]
    assert together(list(logits_MBTV)).data_ptr() == logits_MBTV.data_ptr()
    assert together(shorter).data_ptr() == logits_MBTV.data_ptr()
    apart = [logits_MBTV[0], logits_MBTV[2].clone(), logits_MBTV[1]]
    backwards = [logits_MBTV[2], logits_MBTV[1], logits_MBTV[0]]
    uneven = [logits_MBTV[0], logits_MBTV[1], logits_MBTV[1]]
    for logits_M in (list(logits_MBTV), shorter, apart, backwards, uneven, [logits_MBTV[1]], [logits_MBTV[0]] * 3):
        torch.testing.assert_close(together(logits_M), torch.stack(logits_M), rtol=0, atol=0)


def test_the_compilers_remarks_are_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def remarking(function: Any, **settings: Any) -> Any:
        def call(*given: Any) -> Any:
            warnings.warn("an operation is deprecated", FutureWarning, stacklevel=1)
            return function(*given)

        return call

    compiled_rule._shared.cache_clear()
    monkeypatch.setattr(compiled_rule.torch, "compile", remarking)
    compiled_runner(Product()).decide(inputs(2, 1, 0))
    compiled_rule._shared.cache_clear()


def test_whatever_the_compiler_fails_with_the_rule_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*given: Any) -> Any:
        raise AssertionError

    compiled_rule._shared.cache_clear()
    monkeypatch.setattr(compiled_rule.torch, "compile", lambda function, **settings: failing)
    given = inputs(2, 1, 0)
    for _ in range(2):
        close(compiled_runner(Product()).decide(given), plain_runner(Product()).decide(given))
    compiled_rule._shared.cache_clear()


@pytest.mark.parametrize("warmth", [0.0, 1.0])
def test_drafts_use_what_was_compiled_for_steps(warmth: float, traced: list[Any]) -> None:
    """Token by token, by the number of rows alone."""
    base = build_model("llama")
    model = tessellm.compose(base, {f"e{i}": perturbed(base, i, 0.002) for i in range(2)}, rule="product")
    given, asked = repeating(4), [Sampling(12, warmth, seed=n, ignore_end=True) for n in range(4)]
    expected = [request.tokens for request in Engine(model, slots=4).generate(given, asked)]
    engine = over_slots(Engine(model, slots=4, speculation=Speculation("lookup")), compiled=True)
    torch._dynamo.utils.counters.clear()
    assert [request.tokens for request in draft_always(engine, 3).generate(given, asked)] == expected
    assert engine.speculator is not None
    assert engine.speculator.drafted > 10
    found = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert found == len(traced) <= 4


def close(found: Any, expected: Any) -> None:
    if isinstance(expected, tuple):
        for one, other in zip(found, expected, strict=True):
            close(one, other)
    elif expected is not None:
        torch.testing.assert_close(found, expected)
