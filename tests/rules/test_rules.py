"""Eq. 2 with weights against its formula in float64, and the laws that hold for it."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tessellm.rules import RULES, make_rule, normalised, product, product_scores, tilt

WEIGHTS = st.floats(-3, 3, allow_nan=False, width=32)


def random_logp(seed: int, members: int, *shape: int, scale: float = 3.0, dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(members, *shape, generator=generator, dtype=torch.float64) * scale).log_softmax(-1).to(dtype)


def formula(logp_MBV: torch.Tensor, weights: list[float]) -> torch.Tensor:
    """log p_b + Σ w_i (log p_i − log p_b), normalised, written as the paper writes it."""
    base, experts = logp_MBV[0].double(), logp_MBV[1:].double()
    score = base + sum(w * (expert - base) for w, expert in zip(weights, experts, strict=True))
    return score - score.logsumexp(-1, keepdim=True)


@given(seed=st.integers(0, 10_000), weights=st.lists(WEIGHTS, min_size=1, max_size=6))
def test_product_is_the_formula(seed, weights):
    logp_MBV = random_logp(seed, len(weights) + 1, 2, 11)
    torch.testing.assert_close(product(logp_MBV, weights), formula(logp_MBV, weights), rtol=0, atol=1e-10)


@given(seed=st.integers(0, 10_000), experts=st.integers(1, 6))
def test_default_weights_are_the_papers_rule(seed, experts):
    logp_MBV = random_logp(seed, experts + 1, 3, 9)
    paper = logp_MBV[1:].sum(0) - (experts - 1) * logp_MBV[0]
    torch.testing.assert_close(product(logp_MBV), paper.log_softmax(-1), rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_normalised_in_float32_at_least(dtype):
    logp_MBV = random_logp(0, 4, 5, 1000).to(dtype)
    out_BV = product(logp_MBV, [0.7, -0.3, 1.0])
    assert out_BV.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(out_BV.exp().sum(-1), torch.ones(5, dtype=out_BV.dtype), rtol=0, atol=1e-5)


@given(seed=st.integers(0, 1000), k=st.integers(2, 6), active=st.integers(1, 6))
def test_theorem_one_expert_differs_then_it_speaks_and_z_is_one(seed, k, active):
    active = 1 + active % k
    logp_MBV = random_logp(seed, 2, 4, 13)
    members = torch.stack([logp_MBV[1] if member == active else logp_MBV[0] for member in range(k + 1)])
    torch.testing.assert_close(product(members), logp_MBV[1], rtol=0, atol=1e-12)
    assert product_scores(members).logsumexp(-1).abs().max() < 1e-12


def test_one_expert_alone_is_that_expert_to_the_last_bit():
    logp_MBTV = random_logp(3, 4, 2, 5, 17, dtype=torch.float32)
    tokens, mask = torch.zeros(2, 5, dtype=torch.long), torch.ones(2, 5, dtype=torch.bool)
    assert torch.equal(make_rule("product")(logp_MBTV[:2], tokens, mask, None)[0], logp_MBTV[1])
    assert torch.equal(make_rule("product", [0, 1, 0])(logp_MBTV, tokens, mask, None)[0], logp_MBTV[2])


@given(seed=st.integers(0, 1000), weights=st.permutations([0.7, -0.3, 1.0, 0.0]))
def test_the_order_of_experts_does_not_matter(seed, weights):
    logp_MBV = random_logp(seed, 5, 2, 8)
    order = [weights.index(w) for w in sorted(weights)]
    shuffled = torch.cat([logp_MBV[:1], logp_MBV[1:][order]])
    torch.testing.assert_close(product(logp_MBV, weights), product(shuffled, sorted(weights)), rtol=0, atol=1e-12)


def test_zero_weights_are_the_base():
    logp_MBV = random_logp(1, 3, 2, 7)
    torch.testing.assert_close(product(logp_MBV, [0, 0]), logp_MBV[0], rtol=0, atol=1e-12)


def log_p(*probabilities: float) -> torch.Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


def test_zero_probability_of_a_positive_member_forbids_the_token():
    out_V = product(torch.stack([log_p(0.5, 0.25, 0.25), log_p(0.0, 0.5, 0.5), log_p(0.6, 0.2, 0.2)]))
    assert out_V[0] == -math.inf
    torch.testing.assert_close(out_V[1:].exp(), torch.tensor([0.5, 0.5], dtype=torch.float64))


def test_zero_probability_of_the_base_lets_the_experts_token_win():
    out_V = product(torch.stack([log_p(0.0, 1.0), log_p(0.1, 0.9), log_p(0.2, 0.8)]))
    assert out_V.argmax() == 0  # the experts add what the base cannot say


def test_zero_probability_of_a_silent_member_has_no_effect():
    logp_MBV = torch.stack([log_p(0.5, 0.5), log_p(0.0, 1.0), log_p(0.9, 0.1)])
    torch.testing.assert_close(product(logp_MBV, [0.0, 1.0]), log_p(0.9, 0.1), rtol=0, atol=1e-12)


def test_contradicting_members_leave_the_word_to_the_base():
    logp_MBV = torch.stack([log_p(0.3, 0.7), log_p(1.0, 0.0), log_p(0.0, 1.0)])
    torch.testing.assert_close(product(logp_MBV), log_p(0.3, 0.7))


@settings(max_examples=200)
@given(
    seed=st.integers(0, 10_000),
    weights=st.lists(WEIGHTS, min_size=1, max_size=4),
    zeros=st.integers(0, 2**20),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_never_nan_and_always_a_distribution(seed, weights, zeros, dtype):
    logits_MBV = random_logp(seed, len(weights) + 1, 1, 4, scale=30.0, dtype=dtype)
    dead = torch.tensor([bool(zeros >> bit & 1) for bit in range(logits_MBV.numel())]).view_as(logits_MBV)
    dead[..., seed % 4] = False  # every member says something
    out_BV = product(logits_MBV.masked_fill(dead, -torch.inf).log_softmax(-1), weights)
    assert not out_BV.isnan().any()
    torch.testing.assert_close(out_BV.exp().sum(-1), torch.ones(1, dtype=dtype), rtol=0, atol=1e-5)


def test_an_expert_that_counts_once_is_itself_and_one_that_does_not_count_the_base():
    logp_MBV = torch.randn(4, 3, 7, dtype=torch.float64).log_softmax(-1)
    tilted = tilt(logp_MBV, [1.0, 0.0, 0.5])
    assert torch.equal(tilted[:3], logp_MBV[[0, 1, 0]])
    torch.testing.assert_close(tilted, tilt(logp_MBV, torch.tensor([1.0, 0.0, 0.5])), rtol=0, atol=1e-12)


def test_tilting_then_composing_is_the_weighted_product():
    logp_MBV = random_logp(5, 4, 2, 9)
    weights = [0.7, -0.3, 1.5]
    torch.testing.assert_close(product(tilt(logp_MBV, weights)), product(logp_MBV, weights), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtypes", [(torch.float32,) * 3, (torch.bfloat16, torch.float64, torch.float32)])
def test_log_probabilities_are_the_same_with_and_without_gradients(dtypes):
    logits = [torch.randn(2, 5, 7, dtype=dtype)[:, 1:] for dtype in dtypes]
    with_gradients = normalised(logits)
    with torch.no_grad():
        assert torch.equal(normalised(logits), with_gradients)
    assert with_gradients.shape == (3, 2, 4, 7)


def test_the_table_makes_rules():
    assert set(RULES) >= {"product"}
    with pytest.raises(ValueError, match="unknown rule 'prodct'"):
        make_rule("prodct")
    for name, entry in RULES.items():
        assert entry.summary
        assert entry.reference
        assert make_rule(name).name == name


def test_wrong_numbers_of_weights_are_refused():
    with pytest.raises(ValueError, match="expected 2 weights"):
        product(random_logp(0, 3, 1, 4), [1.0])
    with pytest.raises(ValueError, match="at least one expert"):
        product(random_logp(0, 1, 1, 4))
