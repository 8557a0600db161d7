"""Exact laws: there and back, and what is refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tessellm_lab.theory.operators import once, stepwise
from tessellm_lab.theory.sequences import (
    check_joint,
    conditionals,
    independent,
    joint,
    kl_divergence,
    marginal,
    prefix_laws,
    pushforward,
    random_joint,
    sequence_at,
    total_variation,
    transport,
)

shapes = st.lists(st.integers(2, 4), min_size=1, max_size=5)


def law(shape, seed=0):
    return random_joint(shape, torch.Generator().manual_seed(seed))


@settings(max_examples=50, deadline=None)
@given(shapes, st.integers(0, 1000))
def test_conditionals_and_joint_are_inverse(shape, seed):
    logp = law(shape, seed)
    rows = conditionals(logp)
    assert [row.shape for row in rows] == [tuple(shape[: t + 1]) for t in range(len(shape))]
    torch.testing.assert_close(joint(rows), logp, rtol=0, atol=1e-12)
    for row in rows:
        torch.testing.assert_close(row.logsumexp(-1), torch.zeros_like(row[..., 0]), rtol=0, atol=1e-12)


def test_marginals_prefixes_and_products():
    logp = law([2, 3, 2])
    p = logp.exp()
    torch.testing.assert_close(marginal(logp, [0, 2]).exp(), p.sum(1))
    torch.testing.assert_close(prefix_laws(logp)[2].exp(), p.sum(2))
    parts = [((1,), marginal(logp, [1])), ((2, 0), marginal(logp, [0, 2]))]
    torch.testing.assert_close(independent(parts, 3).exp(), torch.einsum("b,ac->abc", p.sum((0, 2)), p.sum(1)))


def test_transport_and_pushforward():
    logp = law([3, 3])
    image = torch.randperm(9, generator=torch.Generator().manual_seed(1))
    moved = transport(logp, image)
    for number in range(9):
        assert moved[sequence_at(int(image[number]), (3, 3))] == logp[sequence_at(number, (3, 3))]
    labels = torch.arange(9).reshape(3, 3) % 2
    assert float(pushforward(logp, labels)[1].exp()) == pytest.approx(float(logp.exp().flatten()[1::2].sum()))
    assert pushforward(logp, labels, 4)[3] == -torch.inf


def test_distances():
    logp, logq = law([2, 2], 0), law([2, 2], 1)
    assert total_variation(logp, logp) == 0
    assert 0 < total_variation(logp, logq) <= (kl_divergence(logp, logq) / 2) ** 0.5
    certain = torch.tensor([0.9, 0.1]).log()
    assert total_variation(certain, certain.flip(0)) == pytest.approx(0.8)


@pytest.mark.parametrize(
    "wrong", [torch.zeros(2, 2), torch.zeros(2).double(), torch.tensor([0.0, -torch.inf]).double()]
)
def test_what_is_not_a_law_with_full_support_is_refused(wrong):
    with pytest.raises(ValueError, match="sum to one"):
        check_joint(wrong)


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 3), st.integers(1, 4), st.integers(1, 4), st.integers(0, 1000))
def test_the_steps_weights_turn_eq_2_into_c(size, length, experts, seed):
    """p̂(x) Π_t Z_t(x_<t) = Z · C(x): the identity that particles rest on."""
    joints = torch.stack([law([size] * length, 10 * seed + m) for m in range(experts + 1)])
    weights = [1.0, 0.5, -0.3, 0.2][:experts]
    chained, whole = stepwise(joints, weights), once(joints, weights)
    torch.testing.assert_close(chained.logp + chained.log_weight, whole.logp + whole.log_z, rtol=0, atol=1e-10)


def test_one_expert_is_itself_by_both_operators():
    joints = torch.stack([law([3, 3], 0), law([3, 3], 1)])
    torch.testing.assert_close(stepwise(joints).logp, joints[1])
    torch.testing.assert_close(once(joints).logp, joints[1])
    assert abs(once(joints).log_z) < 1e-12
    assert stepwise(joints).largest_log_z < 1e-12
