"""The rule `mixture`: held to one text at a time, one token at a time, written out by hand."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tessellm.rules import ComposedRule, Mixture, make_rule, product
from tessellm.rules.components import component_logp, mix, update


def rows(members: int, batch: int, steps: int, vocabulary: int = 9, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(members, batch, steps, vocabulary, generator=generator)).log_softmax(-1)


def texts(batch: int, steps: int, vocabulary: int = 9, seed: int = 0) -> torch.Tensor:
    return torch.randint(vocabulary, (batch, steps), generator=torch.Generator().manual_seed(seed))


def priors(rule: Mixture, *members: list[float]) -> torch.Tensor:
    return rule.component_prior(torch.tensor(members))


def by_hand(rule: Mixture, logp_MTV: torch.Tensor, tokens_T: list[int], prior_C: torch.Tensor) -> torch.Tensor:
    """Log p̂ of every row of one text. The first token is the prompt's last."""
    experts = len(logp_MTV) - 1
    active = [number for place, number in enumerate(rule.candidates(experts), 1) if prior_C[place] > 0]
    weights, log_pi, said = rule.component_weights(experts, active), prior_C[None].log(), []
    for t, token in enumerate(tokens_T):
        if t:
            each_C1V = component_logp(logp_MTV[:, t - 1 : t], weights)
            log_pi = update(log_pi, each_C1V[:, 0, token][None], prior_C[None], rule.switch_prob)
        said.append(mix(logp_MTV[:, t : t + 1], weights, log_pi)[0])
    return torch.stack(said)


def run(rule, logp, tokens, state, mask=None):
    mask = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
    return rule(logp, tokens, mask, state)


PRIORS = [[0.2, 0.5, 0.3], [1.0, 0.0, 0.0], [0.4, 0.6, 0.0], [0.1, 0.0, 0.9]]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), cuts=st.sets(st.integers(1, 11), max_size=4), rho=st.sampled_from([0.0, 0.01, 0.3]))
def test_texts_with_other_active_members_each_equal_one_by_hand(seed, cuts, rho):
    rule = Mixture(switch_prob=rho)
    logp, tokens = rows(3, 4, 12, seed=seed), texts(4, 12, seed=seed)
    prior_BC = priors(rule, *PRIORS)
    state, said, places = rule.init_state(prior_BC, 9), [], [0, *sorted(cuts), 12]
    for start, stop in itertools.pairwise(places):
        piece, state = run(rule, logp[:, :, start:stop], tokens[:, start:stop], state)
        said.append(piece)
    for place, row in enumerate(torch.cat(said, 1)):
        expected = by_hand(rule, logp[:, place], tokens[place].tolist(), prior_BC[place])
        torch.testing.assert_close(row, expected, atol=1e-5, rtol=1e-5)


def test_one_active_member_is_that_member_to_the_last_bit():
    rule, logp, tokens = Mixture(), rows(3, 3, 8), texts(3, 8)
    prior_BC = priors(rule, [1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0])
    said, _ = run(rule, logp, tokens, rule.init_state(prior_BC, 9))
    for member in range(3):
        assert torch.equal(said[member], logp[member, member])


def test_padding_is_no_evidence_and_leaves_the_state():
    rule, logp, tokens = Mixture(), rows(3, 2, 10, seed=1), texts(2, 10, seed=1)
    state = rule.init_state(priors(rule, [0.2, 0.5, 0.3], [0.2, 0.5, 0.3]), 9)
    mask = torch.tensor([[0, 0, 0, 1, 1, 0, 1, 1, 1, 1], [1] * 10]).bool()
    said, after = run(rule, logp, tokens, state, mask)
    alone, other = run(rule, logp[:, :1, mask[0]], tokens[:1, mask[0]], type(state)(*(each[:1] for each in state)))
    torch.testing.assert_close(said[:1, mask[0]], alone)
    for padded, plain in zip(after, other, strict=True):
        torch.testing.assert_close(padded[:1], plain)


def test_inactive_members_may_compute_nan():
    rule, logp, tokens = Mixture(), rows(4, 1, 6), texts(1, 6)
    logp[2] = torch.nan
    said, _ = run(rule, logp, tokens, rule.init_state(priors(rule, [0.3, 0.4, 0.0, 0.3]), 9))
    expected, _ = run(rule, logp[[0, 1, 3]], tokens, rule.init_state(priors(rule, [0.3, 0.4, 0.3]), 9))
    torch.testing.assert_close(said, expected)


def test_eq_2_holds_a_share_of_the_active_experts_prior():
    found = priors(Mixture(), *PRIORS)
    torch.testing.assert_close(found[0], torch.tensor([0.2, 0.45, 0.27, 0.08]))
    assert found[1].tolist() == [1, 0, 0, 0]
    torch.testing.assert_close(found[2], torch.tensor([0.4, 0.6, 0, 0]))  # one expert alone is its own Eq. 2
    assert priors(Mixture(product_share=0.0), PRIORS[0])[0, -1] == 0
    torch.testing.assert_close(priors(Mixture(), [0.3, 0.7]), torch.tensor([[0.3, 0.7]]))


def test_without_a_router_eq_2_holds_half():
    torch.testing.assert_close(Mixture().unrouted_prior(3), torch.tensor([0.125, 0.125, 0.125, 0.125, 0.5]))
    torch.testing.assert_close(Mixture().unrouted_prior(1), torch.tensor([0.25, 0.75]))
    assert Mixture(styles=(1,)).unrouted_prior(1).tolist() == [1]
    rule, logp, tokens = Mixture(), rows(3, 1, 7), texts(1, 7)
    expected = by_hand(rule, logp[:, 0], tokens[0].tolist(), rule.unrouted_prior(2))
    torch.testing.assert_close(run(rule, logp, tokens, None)[0][0], expected)


def test_styles_and_anti_experts_are_part_of_every_component_and_never_selected():
    rule = Mixture(styles=(2,)).weighted([1.0, 0.5, -0.3, 0.8])
    assert rule.candidates(4) == [1, 4]
    expected = [[0, 0.5, -0.3, 0], [1, 0.5, -0.3, 0], [0, 0.5, -0.3, 0.8], [1, 0.5, -0.3, 0.8]]
    torch.testing.assert_close(rule.component_weights(4), torch.tensor(expected))
    active = rule.component_weights(4, [4])
    torch.testing.assert_close(active[-1], torch.tensor(expected[2]))


def test_styles_alone_are_eq_2():
    rule, logp, tokens = Mixture(styles=(1, 2)), rows(3, 2, 5), texts(2, 5)
    torch.testing.assert_close(run(rule, logp, tokens, None)[0], product(logp))


def test_an_expert_that_weighs_nothing_is_left_out():
    rule, logp, tokens = Mixture().weighted([1.0, 0.0, 1.0]), rows(4, 2, 6), texts(2, 6)
    expected, _ = run(Mixture(), logp[[0, 1, 3]], tokens, None)
    torch.testing.assert_close(run(rule, logp, tokens, None)[0], expected)


def explained(rule, logp, tokens, state=None):
    return rule.explain(logp, tokens, torch.ones_like(tokens, dtype=torch.bool), state)


def test_an_explanation_is_what_the_call_says_and_shares_eq_2_among_the_active():
    rule, logp, tokens = Mixture(), rows(4, 2, 8), texts(2, 8)
    state = rule.init_state(priors(rule, [0.25, 0.5, 0.0, 0.25], [0.0, 0.0, 1.0, 0.0]), 9)
    said, _, why = explained(rule, logp, tokens, state)
    assert torch.equal(said, run(rule, logp, tokens, state)[0])
    pi_BTC = why.more["pi_BTC"]
    torch.testing.assert_close(pi_BTC.sum(-1), torch.ones(2, 8))
    torch.testing.assert_close(why.share_BTM.sum(-1), torch.ones(2, 8))
    half = pi_BTC[0, :, -1] / 2
    torch.testing.assert_close(why.share_BTM[0, :, 1], pi_BTC[0, :, 1] + half)
    assert not why.share_BTM[0, :, 2].any()
    assert (why.owner_BT[1] == 2).all()
    assert why.owner_BT[0, 0] == 1


def test_a_styles_share_is_the_probability_that_it_moved():
    rule, logp, tokens = Mixture(styles=(1, 3)), rows(4, 2, 8), texts(2, 8)
    why = explained(rule, logp, tokens)[2]
    torch.testing.assert_close(why.share_BTM.sum(-1), torch.ones(2, 8))
    torch.testing.assert_close(why.share_BTM[..., 1], why.share_BTM[..., 3])
    assert (why.share_BTM[..., 1] > 0).all()
    logp[[1, 3]] = logp[:1].clone()  # a style that is the base moves nothing
    torch.testing.assert_close(explained(rule, logp, tokens)[2].share_BTM[..., 1], torch.zeros(2, 8), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"switch_prob": 1.5}, "switch_prob must be a number from 0 to 1; got 1.5"),
        ({"alone": True}, "alone must be a number"),
        ({"product_share": math.nan}, "product_share must be a number"),
        ({"most": 0}, "most must be a whole number of members, 1 or more; got 0"),
        ({"styles": (0,)}, "styles are numbers of experts"),
    ],
)
def test_bad_parameters_say_what_was_expected(given, told):
    with pytest.raises(ValueError, match=told):
        Mixture(**given)


def test_styles_of_other_members_are_refused():
    with pytest.raises(ValueError, match="expected styles among 2 experts"):
        Mixture(styles=(3,)).check_fit(2)


def test_it_is_a_rule_of_the_table_and_describes_itself():
    made = make_rule("mixture", [1.0, 0.5], switch_prob=0.05)
    assert made.describe() == {"name": "mixture", "switch_prob": 0.05}
    assert made.routed == Mixture(switch_prob=0.05, weights=(1.0, 0.5))
    assert make_rule("mixture").with_("product").routed is None


def test_weights_that_want_gradients_tilt_the_experts():
    logp, tokens = rows(3, 1, 6), texts(1, 6)
    mask, weights = torch.ones_like(tokens, dtype=torch.bool), torch.tensor([0.7, 1.3], requires_grad=True)
    said, _ = ComposedRule.make("mixture", weights)(logp, tokens, mask, None)
    plain, _ = ComposedRule.make("mixture", weights.tolist())(logp, tokens, mask, None)
    torch.testing.assert_close(said, plain)
    said.gather(-1, tokens[..., None]).sum().backward()
    assert weights.grad.isfinite().all()
    assert weights.grad.any()
