"""Compiled rules say what the rules say, whatever shapes come; traced here as on a GPU, without making kernels."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

import tessellm
from tessellm.decoding import assembly
from tessellm.decoding.buffers import RuleStates, SlotBuffers
from tessellm.decoding.cuda import compiled_rule
from tessellm.decoding.cuda.compiled_rule import best, compiled_runner, together
from tessellm.decoding.engine import Engine
from tessellm.decoding.passes import RuleRunner, Workspace, combine, decide, read_in_blocks
from tessellm.decoding.sampling import Sampling
from tessellm.decoding.speculation import Speculation
from tessellm.decoding.voices import Voice
from tessellm.rules import ComposedRule, Product
from tessellm.rules.belief import Belief
from tessellm.rules.evidence import Evidence

from conftest import build_model, perturbed
from decoding_cases import prompts

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


def inputs(rows: int, tokens: int, seed: int, members: int = 3) -> tuple[list[Any], Any, Any]:
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(seed))
    logits_M = [3 * draw(rows, tokens, VOCABULARY) for _ in range(members)]
    token_BT = torch.arange(rows * tokens).view(rows, tokens) * 7 % VOCABULARY
    return logits_M, token_BT, torch.arange(tokens) <= torch.arange(rows)[:, None]


ENDS = ((1,), (1, 2), (1,))
HABITS = ((0.1, 0.2, -1.0, 0.5, 0.3, 1.0, 0.5, 2.0, 1.0, 0.7), (0.3, 0.1, -2.0, 0.4, 0.2, 0.9, 0.6, 1.5, 1.1, 0.8))
RULES = [
    ComposedRule(Belief()),
    ComposedRule(Belief(HABITS, opening=(0, 7), turn=(14, 21), span=4, user=(28,)), (0.5, 1.0)),
    ComposedRule(Belief(HABITS[:1], opening=(0, 7), turn=(14, 21), span=4, styles=(2,))),
    ComposedRule(Belief(HABITS[:1], opening=(0, 7), turn=(14, 21), span=4, styles=(2,)), (0.5, 1.0)),
    ComposedRule(Evidence(window=8), stops=ENDS, policy="owner"),
    ComposedRule(Product(), (0.5, 1.0), ENDS, "owner"),
    ComposedRule(Product(), (0.5, 2.0)),
    Product((0.5, 2.0)),
]


@pytest.mark.parametrize("rule", RULES)
@torch.inference_mode()
def test_the_same_in_every_shape(rule: Any, traced: list[Any]) -> None:
    plain, compiled = plain_runner(rule), compiled_runner(rule)
    for rows in (2, 4):
        logits_M, token_BT, mask_BT = inputs(rows, 5, seed=rows)
        state = plain.combine(logits_M, token_BT, mask_BT, None)[-1]
        logits_M, token_BT, mask_BT = inputs(rows, 1, seed=10 * rows)
        given = token_BT, mask_BT, state
        close(compiled.combine(logits_M, *given), plain.combine(logits_M, *given))
        close(compiled.decide(logits_M, *given), plain.decide(logits_M, *given))
    assert len(traced) == 4  # two kinds of step for each number of rows
    compiled_runner(rule).decide(logits_M, *given)
    assert len(traced) == 4


@pytest.mark.parametrize("members", [2, 7])  # the sums of few members are taken one by one
@pytest.mark.parametrize("window", [1, 8])
@torch.inference_mode()
def test_many_members_impossible_tokens_and_several_ends(members: int, window: int, traced: list[Any]) -> None:
    rule = ComposedRule(Evidence(window), None, ((1,), (1, 39), *[()] * (members - 2)), "owner")
    plain, compiled, state = plain_runner(rule), compiled_runner(rule), None
    for step in range(6):
        logits_M, token_BT, mask_BT = inputs(4, 1, step, members)
        logits_M[1][:, :, 5:9] = -torch.inf
        token_BT[step % 4] = 39
        mask_BT[(step + 1) % 4] = False
        expected = plain.decide(logits_M, token_BT, mask_BT, state)
        close(compiled.decide(logits_M, token_BT, mask_BT, state), expected)
        close(compiled.combine(logits_M, token_BT, mask_BT, state), plain.combine(logits_M, token_BT, mask_BT, state))
        state = expected[-1]


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
    compiled_runner(Product()).decide(*inputs(2, 1, 0), None)
    compiled_rule._shared.cache_clear()


def test_whatever_the_compiler_fails_with_the_rule_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*given: Any) -> Any:
        raise AssertionError

    compiled_rule._shared.cache_clear()
    monkeypatch.setattr(compiled_rule.torch, "compile", lambda function, **settings: failing)
    given = inputs(2, 1, 0)
    for _ in range(2):
        close(compiled_runner(Product()).decide(*given, None), plain_runner(Product()).decide(*given, None))
    compiled_rule._shared.cache_clear()


@pytest.mark.parametrize(("rule", "warmth"), [("belief", 0.0), ("evidence", 1.0), ("product", 0.0)])
def test_drafts_use_what_was_compiled_for_steps(
    rule: str, warmth: float, traced: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token by token, by the number of rows alone."""
    base = build_model("llama")
    model = tessellm.compose(base, {f"e{i}": perturbed(base, i, 0.002) for i in range(2)}, rule=rule)
    given = prompts(4, 30)
    asked = [Sampling(12, warmth, seed=n, ignore_end=True) for n in range(4)]
    expected = [request.tokens for request in Engine(model, slots=4).generate(given, asked)]
    monkeypatch.setattr(assembly, "RuleRunner", lambda *plain, **settings: compiled_runner(model.rule))
    engine = Engine(model, slots=4, speculation=Speculation("member:base"))
    torch._dynamo.utils.counters.clear()
    assert [request.tokens for request in engine.generate(given, asked)] == expected
    assert engine.speculator is not None
    assert engine.speculator.accepted > 10
    found = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert found == len(traced) <= 4


def close(found: Any, expected: Any) -> None:
    if isinstance(expected, tuple):
        for one, other in zip(found, expected, strict=True):
            close(one, other)
    elif expected is not None:
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    "rule", [Belief(span=40), Belief(HABITS, (5,), (7, 14), 40, user=(21, 28)), Evidence(window=50)]
)
def test_prompts_are_read_in_blocks_that_are_compiled_once(rule: Any, whole: bool, traced: list[Any]) -> None:
    """Whatever their lengths: as they are read at once. What is left over comes first; padding is on the left. The rest
    of prompts that are as long as the rule looks back is compiled, too."""
    runner, voice = compiled_runner(rule), Voice(rule, frozenset())
    slots = SlotBuffers.empty(4, 3, torch.device("cpu"))
    before = int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    long = rule.window + 1
    some = ((1, 32, 0), (2, 64, 9), (1, 97, 40), (3, 45, 2))
    for rows, tokens, padding in ((1, long, 0), (3, long, 4), (1, long, 39)) if whole else some:
        logits_M, token_BT, _ = inputs(rows, tokens, tokens)
        real_BT = (torch.arange(tokens) >= padding).expand(rows, -1)
        work = Workspace([], voice, runner, slots, RuleStates(4), 3 * VOCABULARY)
        slot_B = torch.arange(rows) + 1
        logp_BV, broken_BM = read_in_blocks(work, logits_M, token_BT, real_BT, slot_B, None)
        logp_BTV, expected_BM, state = combine(rule, logits_M, token_BT, real_BT, None)
        torch.testing.assert_close(logp_BV, logp_BTV[:, -1], atol=2e-5, rtol=1e-5)
        assert torch.equal(broken_BM, expected_BM)
        for one, other in zip(work.states.read(voice, slot_B), state, strict=True):
            torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-5)
    assert int(torch._dynamo.utils.counters["stats"]["unique_graphs"]) == before + (2 if whole else 1)


def test_a_prompt_that_is_read_in_pieces_goes_on(traced: list[Any]) -> None:
    rule = Belief(span=40)
    voice, slots = Voice(rule, frozenset()), SlotBuffers.empty(2, 3, torch.device("cpu"))
    work = Workspace([], voice, compiled_runner(rule), slots, RuleStates(2), 3 * VOCABULARY)
    logits_M, token_BT, _ = inputs(1, 90, 3)
    real_BT, slot_B = torch.ones_like(token_BT, dtype=torch.bool), torch.tensor([1])
    for at in (slice(0, 40), slice(40, 90)):
        state = work.states.read(voice, slot_B) if at.start else None
        part_M = [logits[:, at] for logits in logits_M]
        logp_BV, _ = read_in_blocks(work, part_M, token_BT[:, at], real_BT[:, at], slot_B, state)
    expected = combine(rule, logits_M, token_BT, real_BT, None)[0][:, -1]
    torch.testing.assert_close(logp_BV, expected, atol=2e-5, rtol=1e-5)
