"""The mixture of products: its components, its update, and its guarantee on texts made to break it."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tessellm.rules import product
from tessellm.rules.components import component_logp, component_weights, mix, update


def members(count: int, vocabulary: int, seed: int = 0, sharp: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (sharp * torch.randn(count, 1, vocabulary, generator=generator, dtype=torch.float64)).log_softmax(-1)


def test_components_are_the_base_each_expert_and_eq_2():
    logp = members(4, 11)
    base, first, third, both = component_logp(logp, component_weights([1, 3], 3))
    assert torch.equal(base, logp[0])
    assert torch.equal(first, logp[1])
    assert torch.equal(third, logp[3])
    torch.testing.assert_close(both, product(logp, [1, 0, 1]))


def test_a_style_is_heard_in_every_component():
    logp = members(3, 7)
    base, expert = component_logp(logp, component_weights([1], 2, styles=[2]))
    assert torch.equal(base, logp[2])
    torch.testing.assert_close(expert, product(logp))


def test_mix_is_the_sum_of_probabilities():
    logp, weights = members(3, 9), component_weights([1, 2], 2)
    pi = torch.tensor([[0.5, 0.2, 0.0, 0.3]], dtype=torch.float64)
    expected = torch.einsum("bc,cbv->bv", pi, component_logp(logp, weights).exp())
    torch.testing.assert_close(mix(logp, weights, pi.log()).exp(), expected)


def test_a_component_without_weight_may_compute_nan():
    logp = members(2, 5)
    logp[1] = torch.nan
    mixed = mix(logp, component_weights([1], 1), torch.tensor([[0.0, -torch.inf]]))
    assert torch.equal(mixed, logp[0])


def test_an_impossible_token_returns_the_prior():
    prior = torch.tensor([[0.7, 0.3]])
    after = update(torch.tensor([[-0.1, -2.0]]), torch.full((1, 2), -torch.inf), prior)
    torch.testing.assert_close(after.exp(), prior)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 10_000),
    st.sampled_from([0.0, 0.001, 0.01, 0.2]),
    st.lists(st.integers(0, 3), min_size=2, max_size=30),
    st.sampled_from(["likely", "unlikely", "random"]),
)
def test_the_guarantee_holds_on_any_text(seed: int, switch_prob: float, path: list[int], text: str):
    """Against any sequence of components, on texts chosen against the mixture too."""
    generator = torch.Generator().manual_seed(seed)
    prior = torch.rand(1, 4, generator=generator, dtype=torch.float64).softmax(-1)
    weights, log_pi = component_weights([1, 2], 2), prior.log()
    loss = best = 0.0
    for step, component in enumerate(path):
        logp = members(3, 6, seed + 31 * step, sharp=4.0)
        each_CV, mixed_V = component_logp(logp, weights)[:, 0], mix(logp, weights, log_pi)[0]
        choice = {"likely": mixed_V.argmax(), "unlikely": mixed_V.argmin(), "random": torch.tensor(seed % 6)}[text]
        loss, best = loss - mixed_V[choice].item(), best - each_CV[component, choice].item()
        log_pi = update(log_pi, each_CV[:, choice][None], prior, switch_prob)
    switches = [after for before, after in itertools.pairwise(path) if before != after]
    if switches and not switch_prob:
        return
    price = -math.log(prior[0, path[0]]) - sum(math.log(switch_prob * prior[0, c]) for c in switches)
    stayed = len(path) - 1 - len(switches)
    assert loss <= best + price - stayed * math.log1p(-switch_prob) + 1e-9


def test_without_switching_a_mixture_costs_the_log_of_its_prior_at_most():
    log_pi = prior = torch.tensor([[0.25, 0.75]])
    log_pi = prior.log()
    for _ in range(50):
        log_pi = update(log_pi, torch.tensor([[-1.0, -3.0]]), prior, 0.0)
    assert log_pi[0, 0].exp() == pytest.approx(1.0)
