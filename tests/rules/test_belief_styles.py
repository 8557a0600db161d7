"""Laws of styles: the guarantee with styled laws, what a style does and how it is shown, and bad numbers of styles."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_belief import HABITS, OPENING, TURN, check_chunks, explain, losses, random_logp, random_tokens

from tessellm.rules import ComposedRule, product
from tessellm.rules.belief import SHARE, Belief
from tessellm.rules.styles import apart, in_styles


def styled(experts: int, *styles: int) -> Belief:
    return Belief(HABITS * (experts - len(styles)), OPENING, TURN, 6, styles)


@settings(max_examples=40, deadline=None)
@given(experts=st.integers(2, 5), style=st.integers(1, 5), seed=st.integers(0, 10**6), spread=st.floats(0.1, 10))
def test_no_styled_law_is_better_by_more_than_its_prior(experts, style, seed, spread):
    style, steps = min(style, experts), 25
    logp, tokens = random_logp(experts + 1, 2, steps, 9, seed=seed, spread=spread), random_tokens(2, steps, 9, seed)
    said, _, why = explain(Belief(styles=(style,)), logp, tokens)
    torch.testing.assert_close(said.exp().sum(-1), torch.ones(2, steps))
    price = -why.more["law_BTL"][:, 0].log() - steps * math.log1p(-SHARE)
    own = [number for number in range(experts + 2) if number != style]
    laws = [*in_styles(*apart(logp, (style,))), product(logp)]
    for number, law in zip(own, laws, strict=True):
        assert (losses(said, tokens).sum(1) <= losses(law, tokens).sum(1) + price[:, number] + 1e-3).all()


def test_a_styled_law_is_eq_2_over_it_and_the_styles():
    logp = random_logp(4, 1, 3, 9, seed=1)
    base, first, *styles = logp
    found = in_styles(*apart(logp, (2, 3)))
    torch.testing.assert_close(found[0], product(torch.stack([base, *styles])))
    expected = (first + sum(style - base for style in styles)).log_softmax(-1)
    torch.testing.assert_close(found[1], expected)
    torch.testing.assert_close(in_styles(*apart(logp[[0, 1, 2]], (2,)))[0], logp[2])  # the base in one style


def test_who_answers_is_asked_without_the_style():
    logp, tokens = random_logp(4, 1, 30, 7, seed=2), random_tokens(1, 30, 7, 2)
    tokens[0, 20:22] = torch.tensor(TURN)
    why = explain(styled(3, 2), logp, tokens)[2]
    plain = explain(Belief(HABITS * 2, OPENING, TURN, 6), logp[[0, 1, 3]], tokens)[2]
    torch.testing.assert_close(why.more["law_BTL"][0, 21, [0, 1, 3, 4]], plain.more["law_BTL"][0, 21])
    torch.testing.assert_close(why.more["score_BTK"][..., [0, 2]], plain.more["score_BTK"])
    assert not why.more["law_BTL"][..., 2].any()
    assert not why.more["score_BTK"][..., 1].any()


def test_a_styles_share_is_the_probability_that_it_moved():
    logp, tokens = random_logp(4, 2, 12, 7, seed=3), random_tokens(2, 12, 7, 3)
    why = explain(Belief(styles=(1, 3)), logp, tokens)[2]
    torch.testing.assert_close(why.belief_BTM.sum(-1), torch.ones(2, 12))
    torch.testing.assert_close(why.belief_BTM[..., 1], why.belief_BTM[..., 3])
    assert (why.belief_BTM[..., 1] > 0).all()
    logp[[1, 3]] = logp[:1].clone()  # a style that is the base moves nothing
    said, _, why = explain(Belief(styles=(1, 3)), logp, tokens)
    torch.testing.assert_close(said, explain(Belief(), logp[[0, 2]], tokens)[0])
    torch.testing.assert_close(why.belief_BTM[..., 1], torch.zeros(2, 12), atol=1e-5, rtol=0)


def test_a_styles_weight_is_how_loud_it_is():
    logp, tokens = random_logp(3, 1, 12, 7, seed=4), random_tokens(1, 12, 7, 4)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    rule = Belief(styles=(2,))
    silent = ComposedRule.make(rule, [1.0, 0.0])(logp, tokens, mask, None)[0]
    torch.testing.assert_close(silent, explain(Belief(), logp[:2], tokens)[0], atol=1e-5, rtol=1e-5)
    louder = ComposedRule.make(rule, [1.0, 2.0])(logp, tokens, mask, None)[0]
    twice = torch.cat([logp, logp[2:]])
    torch.testing.assert_close(louder, explain(Belief(styles=(2, 3)), twice, tokens)[0], atol=1e-5, rtol=1e-5)


@settings(max_examples=15, deadline=None)
@given(cuts=st.sets(st.integers(1, 29), max_size=5), seed=st.integers(0, 10**6))
def test_chunks_agree_with_the_whole(cuts, seed):
    rule, logp, tokens = styled(3, 1), random_logp(4, 2, 30, 7, seed=seed), random_tokens(2, 30, 7, seed)
    check_chunks(rule, logp, tokens, cuts)


def test_zeros_stay_defined():
    logp = random_logp(4, 2, 20, 9, seed=1)
    logp[1, :, 5:, :4] = -torch.inf
    logp[2, :, 9:, 4:] = -torch.inf
    said, _, why = explain(Belief(styles=(2,)), logp.log_softmax(-1), random_tokens(2, 20, 9, 1))
    torch.testing.assert_close(said.exp().sum(-1), torch.ones(2, 20))
    torch.testing.assert_close(why.belief_BTM.sum(-1), torch.ones(2, 20))


@pytest.mark.parametrize("styles", [(0,), (1, 1), (True,), (1.0,)])
def test_styles_are_numbers_of_experts(styles):
    with pytest.raises(ValueError, match="styles are numbers of experts"):
        Belief(styles=styles)


def test_styles_fit_the_members():
    with pytest.raises(ValueError, match="expected styles among 2 experts"):
        Belief(styles=(3,)).check_fit(2, 9)
    with pytest.raises(ValueError, match="expected an expert that is no style"):
        Belief(styles=(1, 2)).check_fit(2, 9)
    assert Belief().lets_members_rest
    assert not Belief(styles=(1,)).lets_members_rest
