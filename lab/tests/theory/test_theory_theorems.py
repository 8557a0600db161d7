"""The theorems are laws: hypothesis draws the families. `tessellm reproduce theorems` runs thousands more."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tessellm_lab.theory import once, stepwise
from tessellm_lab.theory.families import (
    any_bijection,
    factorized_family,
    keep_prefixes,
    owners_of,
    perturbed,
    random_owners,
    skilled_family,
    tightest_family,
    two_bits,
)
from tessellm_lab.theory.sequences import random_joint
from tessellm_lab.theory.theorems import (
    approximate,
    lemma_1,
    length_statement,
    linear_merging,
    merge_linear,
    task_arithmetic_violation,
    theorem_1,
    theorem_2,
    theorem_3,
)

EXACT = 1e-10
sizes, lengths, experts, seeds = st.integers(2, 4), st.integers(1, 5), st.integers(1, 4), st.integers(0, 10**6)
quick = settings(max_examples=60, deadline=None)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


@quick
@given(sizes, lengths, experts, seeds)
def test_theorem_1(size, length, k, seed):
    assert theorem_1(factorized_family([size] * length, k, seeded(seed))) < EXACT


def test_theorem_1_fails_where_its_hypothesis_does():
    family = factorized_family([3] * 3, 2, seeded(0), ((), (0, 1), (2,)))
    joints = family.joints.clone()
    joints[2] = random_joint([3] * 3, seeded(1))
    assert theorem_1(type(family)(joints, family.blocks)) > 0.1


@quick
@given(sizes, lengths, experts, seeds, st.booleans())
def test_theorem_2(size, length, k, seed, recur):
    assert theorem_2(skilled_family(size, length, k, seeded(seed), recur)) < EXACT


@quick
@given(sizes, st.integers(1, 4), experts, seeds)
def test_lemma_1(size, length, k, seed):
    generator = seeded(seed)
    joints = torch.stack([random_joint([size] * length, generator) for _ in range(k + 1)])
    assert lemma_1(joints, any_bijection([size] * length, generator)) < EXACT


@quick
@given(st.integers(2, 3), st.integers(2, 3), st.integers(1, 3), st.integers(1, 3), seeds)
def test_theorem_3_for_both_operators_where_d_keeps_prefixes(content, style, length, k, seed):
    """A token is a pair of features; which pair depends on the whole prefix."""
    generator = seeded(seed)
    features = factorized_family([content, style] * length, k, generator)
    tokens = [content * style] * length
    found = theorem_3(features, keep_prefixes(tokens, generator), tokens)
    assert max(found.once_gap, found.stepwise_gap, found.difference) < EXACT


@quick
@given(st.integers(2, 3), st.integers(2, 3), seeds)
def test_theorem_3_for_any_d_holds_for_c(size, length, seed):
    generator = seeded(seed)
    features = factorized_family([size] * length, 2, generator)
    assert theorem_3(features, any_bijection([size] * length, generator), [size] * length).once_gap < EXACT


def test_the_gap_eq_2_is_not_c():
    joints, features = two_bits()
    for feature in features:
        assert float(once(joints).logp.exp()[feature == 1].sum()) == pytest.approx(0.9, abs=1e-12)
        assert float(stepwise(joints).logp.exp()[feature == 1].sum()) == pytest.approx(0.744, abs=5e-4)
    assert once(joints).log_z == pytest.approx(0, abs=1e-12)  # the features are independent, so Z = 1


def test_eq_2_fails_for_a_d_that_keeps_nothing():
    generator = seeded(3)
    features = factorized_family([3] * 3, 2, generator, ((), (0, 2), (1,)))
    assert theorem_3(features, any_bijection([3] * 3, generator), [3] * 3).stepwise_gap > 0.01


@quick
@given(sizes, st.integers(1, 4), st.integers(1, 5), seeds, st.floats(0, 2), st.booleans(), st.booleans())
def test_the_approximate_theorem_is_never_exceeded(size, length, k, seed, epsilon, aligned, unit):
    generator = seeded(seed)
    family = perturbed(skilled_family(size, length, k, generator), epsilon, generator, aligned)
    weights = None if unit else (2 * torch.rand(k, generator=generator) - 0.5).tolist()
    assert approximate(family, weights).excess < EXACT


@quick
@given(st.integers(1, 6), st.floats(0.001, 0.2), st.integers(1, 4))
def test_the_bound_is_nearly_met(k, epsilon, length):
    found = approximate(tightest_family(epsilon, k, length))
    assert found.excess < EXACT
    a = k * epsilon
    assert found.kl_bound == pytest.approx(length * min(2 * a, a * a / 2), rel=1e-9)
    if a < 0.5:
        assert found.kl > 0.85 * found.kl_bound


@quick
@given(sizes, st.integers(1, 5), st.floats(0, 1.5), seeds)
def test_where_nobody_acts_log_z_is_of_second_order(size, k, epsilon, seed):
    generator = seeded(seed)
    family = skilled_family(size, 2, k, generator)
    idle = type(family)(family.joints[:1].expand_as(family.joints), [torch.zeros_like(o) for o in family.owner])
    log_z = stepwise(perturbed(idle, epsilon, generator, aligned=True).joints).largest_log_z
    assert log_z <= (k * epsilon) ** 2 / 2 + EXACT


def test_exact_families_have_no_budget():
    family = factorized_family([3] * 3, 3, seeded(0))
    found = approximate(type(skilled_family(2, 1, 1, seeded(0)))(family.joints, owners_of(family)))
    assert found.kl_bound < EXACT
    assert found.projective_gap < EXACT


@quick
@given(st.integers(1, 8), experts, seeds)
def test_the_length_statement(length, k, seed):
    generator = seeded(seed)
    family = factorized_family([2] * length, k, generator)
    right = [torch.rand([2] * len(block), generator=generator) < 0.7 for block in family.blocks]
    assert length_statement(family, right) < EXACT


@quick
@given(st.integers(2, 8), st.integers(1, 8), experts, seeds)
def test_linear_merging(outputs, inputs, k, seed):
    generator = seeded(seed)
    owner = torch.randint(k + 1, (outputs,), generator=generator)
    masks = torch.stack([(owner == i).double() for i in range(1, k + 1)])
    base = torch.randn(outputs, inputs, generator=generator, dtype=torch.float64)
    change = torch.randn(k, outputs, inputs, generator=generator, dtype=torch.float64)
    maps = torch.stack([base, *(base + masks.unsqueeze(-1) * change)])
    batch = torch.randn(5, inputs, generator=generator, dtype=torch.float64)
    assert linear_merging(maps, masks, batch) < EXACT
    broken = maps.clone()
    broken[1] += 1
    if k > 1 and bool(masks[1].any()):
        assert linear_merging(broken, masks, torch.ones_like(batch)) > 0.5


def test_merging_is_eq_5_and_violations_are_counted():
    maps = torch.tensor([[1.0], [3.0], [4.0]])
    assert merge_linear(maps).tolist() == [6.0]
    same = torch.tensor([[[0.5, 0.5]]]).log()
    other = torch.tensor([[[0.25, 0.75]]]).log()
    assert task_arithmetic_violation(same, same) == 0
    assert task_arithmetic_violation(same, other) == pytest.approx(0.25)


def test_owners_are_functions_of_the_prefix():
    owner = random_owners(3, 4, 2, seeded(0))
    assert [o.shape for o in owner] == [(), (3,), (3, 3), (3, 3, 3)]
