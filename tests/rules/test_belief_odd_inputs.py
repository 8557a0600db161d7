"""What a user may give the belief rule without meaning to: each is defined."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tessellm
from tessellm.decoding.engine import Engine
from tessellm.decoding.sampling import Sampling
from tessellm.rules import ComposedRule, product
from tessellm.rules.belief import Belief

from conftest import build_model, perturbed

HABITS = ((0.0, 0.0, -1.0, -1.0, 1.0, 0.5, 0.5, 1.0, 1.0, 0.7),)
STEPS, VOCABULARY, TURN = 24, 9, (3, 1)


def laws(members: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(members, 1, STEPS, VOCABULARY, generator=generator) * 2).log_softmax(-1)


def text(seed: int = 0) -> torch.Tensor:
    tokens = torch.randint(4, VOCABULARY, (1, STEPS), generator=torch.Generator().manual_seed(seed))
    tokens[0, 8:10] = torch.tensor(TURN)
    return tokens


def said(rule: ComposedRule, logp: torch.Tensor, tokens: torch.Tensor) -> Any:
    found = rule.explain(logp, tokens, torch.ones_like(tokens, dtype=torch.bool), None)
    assert not found[0].isnan().any()
    torch.testing.assert_close(found[0].exp().sum(-1), torch.ones(1, STEPS), atol=1e-4, rtol=0)
    return found


def calibrated(experts: int, **options: Any) -> ComposedRule:
    return ComposedRule(Belief(HABITS * experts, (), TURN, 8), **options)


@pytest.mark.parametrize("rule", [calibrated(1), ComposedRule(Belief())], ids=["habits", "none"])
def test_one_expert(rule: ComposedRule) -> None:
    """Three laws, of which Eq. 2 is the expert's: a mixture of base and expert."""
    logp = laws(2)
    torch.testing.assert_close(product(logp), logp[1])
    found, _, why = said(rule, logp, text())
    base_BT1, *expert = why.more["law_BTL"].split(1, -1)
    assert len(expert) == 2
    torch.testing.assert_close(found.exp(), base_BT1 * logp[0].exp() + sum(expert) * logp[1].exp())


def test_the_same_expert_twice_with_habits_is_believed_alike() -> None:
    """Its scores are; the belief goes to the first, which says the same."""
    logp = laws(2)
    why, once = said(calibrated(2), logp[[0, 1, 1]], text())[2], said(calibrated(1), logp, text())[2]
    for expert in (0, 1):
        torch.testing.assert_close(why.more["score_BTK"][..., expert], once.more["score_BTK"][..., 0])
    likeliest_T, once_T = (each.more["law_BTL"][0, :10].argmax(-1) for each in (why, once))
    assert torch.equal(likeliest_T, once_T)


def test_experts_that_are_the_base_change_nothing() -> None:
    logp = laws(1)
    torch.testing.assert_close(said(calibrated(2), logp[[0, 0, 0]], text())[0], logp[0])


@pytest.mark.parametrize("policy", ["rule", "owner"])
@pytest.mark.parametrize("what", ["an expert is sure", "all but one token of each", "nothing in common"])
def test_rows_with_zeros(what: str, policy: str) -> None:
    logp, tokens = laws(3), text()
    if what == "an expert is sure":
        logp[1, ..., 1:] = -torch.inf
    elif what == "nothing in common":
        logp[1, ..., 4:], logp[2, ..., :4] = -torch.inf, -torch.inf
    else:
        for member in range(3):
            logp[member, ..., torch.arange(VOCABULARY) != member + 3] = -torch.inf
    rule = calibrated(2, stops=((2,), (2,), (2,)), policy=policy)
    _, state, why = said(rule, logp.log_softmax(-1), tokens)
    assert not why.more["law_BTL"].isnan().any()
    assert not any(part.isnan().any() for part in state)


def test_every_member_with_an_end_token_of_its_own() -> None:
    """By the rule end tokens are tokens; by policy they are one event. Both are laws, and both stop."""
    logp, tokens = laws(3), text()
    logp[1, :, -1, 5], logp[2, :, -1, 6] = 9.0, 9.0
    for policy in ("rule", "owner", "any", "mean", "base"):
        rule = calibrated(2, stops=((4,), (5,), (6,)), policy=policy)
        assert said(rule, logp.log_softmax(-1), tokens)[0][0, -1, [4, 5, 6]].exp().sum() > 0.01


@pytest.mark.parametrize("termination", ["rule", "owner"])
def test_end_tokens_that_differ_end_texts_alike_by_engine_and_reference(termination: str) -> None:
    base = build_model(eos_token_id=2)
    experts = [perturbed(base, 1), perturbed(base, 2)]
    for expert, end in zip(experts, (7, [2, 11]), strict=True):
        expert.generation_config.eos_token_id = expert.config.eos_token_id = end
    model: Any = tessellm.compose(
        base, dict(zip("ab", experts, strict=True)), rule={"name": "belief", "habits": HABITS * 2, "turn": TURN},
        termination=termination,
    )  # fmt: skip
    assert set(model.config.eos_token_id) == {2, 7, 11}
    for seed in range(4):
        prompt = [*torch.randint(4, 60, (20,), generator=torch.Generator().manual_seed(seed)).tolist(), *TURN]
        request = Engine(model, 1).generate([prompt], Sampling(24))[0]
        whole = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0, len(prompt) :].tolist()
        assert request.tokens == whole[: len(request.tokens)]
        assert (request.finish_reason == "stop") == (request.tokens[-1] in (2, 7, 11))
