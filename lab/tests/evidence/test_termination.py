"""Stopping as its own event: what each policy does, and which of them keep a rule conservative."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tessellm.rules import BaseRule, Product, product
from tessellm_lab.evidence import POLICIES, Evidence, Stopping
from tessellm_lab.evidence.termination import as_event, ends_of, release

import termination_reference as slow

STOPS = ((7,), (7,), (6, 7), (5,))


def members(*shape: int, seed: int) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3).log_softmax(-1)


def terminated(rule: BaseRule, stops: tuple[tuple[int, ...], ...], policy: str) -> Stopping:
    return Stopping(rule, policy, stops)


def run(rule: BaseRule, logp: Tensor, seed: int = 0) -> Tensor:
    tokens = torch.randint(logp.shape[-1], logp.shape[1:3], generator=torch.Generator().manual_seed(seed))
    return rule(logp, tokens, torch.ones_like(tokens, dtype=torch.bool), None)[0]


def test_stop_events_add_up_all_end_tokens_of_a_member():
    logp = members(4, 2, 3, 8, seed=0)
    h = as_event(logp, ends_of(STOPS, logp.device))[1].exp()
    torch.testing.assert_close(h[2], logp[2, ..., 6:].exp().sum(-1))
    torch.testing.assert_close(h[3], logp[3, ..., 5].exp())


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("inner", [Product(), Evidence(window=4)], ids=lambda rule: rule.name)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), share=st.floats(0, 0.9))
def test_every_policy_gives_a_distribution(policy, inner, seed, share):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(4, 2, 9, 8, generator=generator) * 9
    holes = torch.rand(logits.shape, generator=generator) < share
    holes.scatter_(-1, logits.argmax(-1, keepdim=True), False)
    logp = logits.masked_fill(holes, -torch.inf).log_softmax(-1)
    out = run(terminated(inner, STOPS, policy), logp, seed)
    assert not out.isnan().any()
    torch.testing.assert_close(out.exp().sum(-1), torch.ones(2, 9), atol=1e-4, rtol=0)


@pytest.mark.parametrize("policy", ["owner", "rule"])
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), experts=st.integers(1, 5))
def test_conservative_policies_keep_eq_2(policy, seed, experts):
    """One end token, at most one expert differs: the composition is that expert, its stops included."""
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(1, 2, 12, 8, generator=generator) * 2
    logits = base.repeat(experts + 1, 1, 1, 1)
    active = torch.randint(1, experts + 1, (12,), generator=generator)
    logits[active, :, torch.arange(12)] += torch.randn(12, 2, 8, generator=generator) * 4
    logp = logits.log_softmax(-1)
    for inner in (Product(), Evidence()):
        out = run(terminated(inner, ((7,),) * (experts + 1), policy), logp, seed)
        assert ((out.exp() - product(logp).exp()).abs().sum(-1) / 2).max() < 1e-3


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), experts=st.integers(1, 5))
def test_owner_keeps_eq_2_but_for_the_choice_among_end_tokens(seed, experts):
    """With two end tokens the stop is Eq. 2's, and so is every continuation; which of the two is written may not be."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(1, 2, 12, 8, generator=generator) * 2).repeat(experts + 1, 1, 1, 1)
    active = torch.randint(1, experts + 1, (12,), generator=generator)
    logits[active, :, torch.arange(12)] += torch.randn(12, 2, 8, generator=generator) * 4
    logp = logits.log_softmax(-1)
    expected = product(logp).exp()
    for inner in (Product(), Evidence()):
        out = run(terminated(inner, ((6, 7),) * (experts + 1), "owner"), logp, seed).exp()
        torch.testing.assert_close(out[..., :6], expected[..., :6], atol=1e-3, rtol=0)
        torch.testing.assert_close(out[..., 6:].sum(-1), expected[..., 6:].sum(-1), atol=1e-3, rtol=0)


def test_different_end_tokens_are_one_event():
    """Two experts end with different tokens: Eq. 2 on tokens goes on, the event stops."""
    logits = torch.full((3, 1, 1, 8), -4.0)
    logits[0, ..., 0], logits[1, ..., 6], logits[2, ..., 7] = 6.0, 6.0, 6.0
    logits[1, ..., 7], logits[2, ..., 6] = -20.0, -20.0
    logp = logits.log_softmax(-1)
    stops = ((6, 7), (6,), (7,))
    assert run(terminated(Product(), stops, "rule"), logp)[..., 6:].exp().sum() < 0.01
    for policy in ("owner", "any", "mean"):
        assert run(terminated(Product(), stops, policy), logp)[..., 6:].exp().sum() > 0.9


def test_the_base_policy_follows_the_base():
    logp = members(3, 1, 5, 8, seed=4)
    out = run(terminated(Product(), ((7,), (7,), (7,)), "base"), logp)
    torch.testing.assert_close(out[..., 7], logp[0, ..., 7], atol=1e-4, rtol=1e-4)


def test_wrong_policies_say_what_is_known():
    with pytest.raises(ValueError, match=r"unknown termination policy 'never'.*owner"):
        terminated(Product(), STOPS, "never")
    logp = members(3, 1, 5, 8, seed=4)
    assert torch.equal(run(terminated(Product(), ((), (), ()), "owner"), logp), product(logp))  # nobody has an end


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), scale=st.sampled_from([1.0, 4.0, 9.0]))
def test_the_fast_form_equals_the_slow_one(seed, scale):
    generator = torch.Generator().manual_seed(seed)
    logp = (torch.randn(4, 2, 3, 8, generator=generator) * scale).double().log_softmax(-1)
    ends, stop_MV, event = ends_of(STOPS, logp.device), slow.stop_sets(STOPS, 8), 5
    seen, log_h = as_event(logp, ends)
    torch.testing.assert_close(log_h, slow.stop_logp(logp, stop_MV), atol=1e-5, rtol=0)
    torch.testing.assert_close(seen.exp(), slow.as_event(logp, stop_MV, event).exp(), atol=1e-5, rtol=0)
    spoken = seen[1]
    share = torch.rand(4, 2, 3, generator=generator).double().softmax(0)
    h = torch.rand(2, 3, generator=generator).double().log()
    fast = release(logp, ends, spoken, h, share)
    torch.testing.assert_close(
        fast.exp(), slow.release(logp, stop_MV, event, spoken, h, share).exp(), atol=1e-5, rtol=0
    )


def test_a_member_with_nothing_but_foreign_ends_stops():
    logp = torch.tensor([[0.2, 0.3, 0.5], [0.0, 0.4, 0.6]]).log()[:, None, None]
    seen, log_h = as_event(logp, ends_of(((2,), (1,)), logp.device))
    torch.testing.assert_close(log_h[1].exp().item(), 1.0)
    torch.testing.assert_close(seen.exp().sum(-1), torch.ones(2, 1, 1))
