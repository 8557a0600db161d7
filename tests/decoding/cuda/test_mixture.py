"""A mixture's kernels say what the rule says. They run here in Triton's interpreter, on the CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("run with TRITON_INTERPRET=1 (make test-kernels), or on a GPU", allow_module_level=True)

from tessellm.decoding.buffers import row_bucket
from tessellm.decoding.cuda import compiled_rule, mixture
from tessellm.rules import ComposedRule
from tessellm.rules.belief import Belief

from mixture_cases import HABITS, Case

COMPILE = torch.compile
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # −∞ − −∞, which is not used


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Few pieces of a vocabulary, and of few tokens; the belief is not compiled."""
    for name, value in (("PIECES", ((8, 4), (64, 2))), ("FEW_PIECES", 1), ("BLOCK", 64), ("MEMBER_BLOCK", 64)):
        monkeypatch.setattr(mixture, name, value)
    monkeypatch.setattr(compiled_rule.torch, "compile", lambda function, **given: function)
    compiled_rule._shared.cache_clear()
    yield
    compiled_rule._shared.cache_clear()


@pytest.mark.parametrize(
    ("members", "vocabulary", "texts", "calibrated", "prompt"),
    [(2, 40, 1, True, 35), (3, 110, 2, True, 14), (9, 40, 1, False, 4)],
)
@torch.inference_mode()
def test_says_what_the_rule_says(members: int, vocabulary: int, texts: int, calibrated: bool, prompt: int) -> None:
    """Of prompts longer than a block, padded ones and short ones, steps, and drafts."""
    case = Case(members, vocabulary, texts, "cpu", calibrated)
    state = case.read(prompt)
    case.step(state)
    case.step(state, impossible=True)
    case.judge(state, 6)


@pytest.mark.parametrize(("value", "member"), [(torch.nan, 0), (torch.inf, 1)])
@torch.inference_mode()
def test_members_that_compute_no_number_are_told(value: float, member: int) -> None:
    case = Case(3, 40, 2, "cpu")
    case.broken(case.read(4), value, member)


def test_nothing_possible_by_eq_2_is_said_by_the_base() -> None:
    """Each of two experts allows only what the other forbids."""
    case = Case(3, 60, 1, "cpu")
    with torch.inference_mode():
        state = case.read(4)
        logits_M = case.logits(1)
        logits_M[1][..., 30:] = logits_M[2][..., :30] = -torch.inf
        token_11, mask_11 = case.tokens(1), torch.ones(1, 1, dtype=torch.bool)
        wanted = compiled_rule.combine(case.rule, logits_M, token_11, mask_11, state)
        found = case.mixture.combine(logits_M, token_11, mask_11, state)
    torch.testing.assert_close(found[0], wanted[0], atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(found[2].pending_BLV[:, -1], logits_M[0][:, 0].log_softmax(-1))


def test_which_rules_have_kernels() -> None:
    plain = Belief([HABITS] * 2, turn=(3,))
    assert ComposedRule(plain).mixture is plain
    assert ComposedRule(plain, (1.0, 1.0)).mixture is plain
    assert ComposedRule(plain, (1.0, 0.5)).mixture is None
    assert ComposedRule(plain, None, ((1,), (), ()), "owner").mixture is None
    assert ComposedRule(Belief([HABITS], styles=(2,))).mixture is None
    assert ComposedRule.make("evidence").mixture is None


@torch.inference_mode()
def test_one_block_is_compiled_for_prompts_and_drafts_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced as the compiler would be given it."""
    monkeypatch.setattr(compiled_rule.torch, "compile", lambda function, **given: COMPILE(function, backend="eager"))
    case = Case(2, 40, 1, "cpu")
    before = int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    for length in (33, 40):
        state = case.read(length)
    for width in (4, 9):
        case.judge(state, width)
    assert int(torch._dynamo.utils.counters["stats"]["unique_graphs"]) == before + 1
    torch._dynamo.reset()


def test_blocks_are_compiled_for_few_numbers_of_texts() -> None:
    found: Any = {row_bucket(texts, few=True) for texts in range(1, 65)}
    assert found == {1, 4, 16, 32, 64}
    assert all(row_bucket(texts, few=True) >= texts for texts in range(1, 65))
