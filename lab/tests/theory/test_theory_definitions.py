"""Every check is zero on families that satisfy its definition, and finds a violation that was planted."""

import pytest
import torch

from tessellm_lab.theory import (
    disjoint_coordinates,
    factorized,
    find_partition,
    jointly_factorizable,
    projective,
    skill_factorizable,
    stepwise,
)
from tessellm_lab.theory.definitions import coordinates
from tessellm_lab.theory.families import (
    any_bijection,
    factorized_family,
    owners_of,
    perturbed,
    skilled_family,
    tilted,
    with_member,
)
from tessellm_lab.theory.sequences import transport

BLOCKS = ((2,), (0, 3), (1,))
EXACT = 1e-10


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(7)


@pytest.fixture
def family(generator):
    return factorized_family([3] * 4, 2, generator, BLOCKS)


def test_definition_1_holds_and_its_partition_is_found(family):
    assert factorized(family.joints, BLOCKS).holds(EXACT)
    assert find_partition(family.joints) == BLOCKS


def test_definition_1_names_the_condition_that_fails(family):
    joints = family.joints
    outside = factorized(with_member(joints, 1, tilted(joints[1], (0, 0), 0.5)), BLOCKS)
    assert outside.value > 1e-3
    assert outside.witness["expert"] == 1
    base = factorized(with_member(joints, 0, tilted(joints[0], (0,), 0.5)), BLOCKS)
    assert base.value > 1e-3
    for gap in (outside, base):
        assert not gap.holds()
        assert gap.unit == "total variation"


def test_definition_1_equal_marginals_with_dependence_are_found(family):
    """Expert 2's block made to follow expert 1's, with no marginal changed at single positions."""
    joints = family.joints
    p = joints[2].exp()
    bump = torch.zeros_like(p)
    swap = 0.5 * p.min()
    for a, b, sign in [(0, 0, 1), (0, 1, -1), (1, 0, -1), (1, 1, 1)]:
        bump[a, b] = sign * swap
    gap = factorized(with_member(joints, 2, (p + bump).log()), BLOCKS)
    assert gap.witness["condition"] == "block and rest independent under the expert"
    assert gap.value == pytest.approx(0.5 * float(bump.abs().sum()), rel=1e-6)


def test_no_partition_is_found_where_two_experts_share_a_position(family):
    joints = with_member(family.joints, 2, tilted(family.joints[2], (), 0.3))
    assert find_partition(joints) is None


def test_no_partition_is_found_where_blocks_of_two_experts_depend(family):
    row = tilted(family.joints[0], (0,), 0.3)
    assert find_partition(with_member(family.joints, 0, row)) is None


def test_a_wrong_partition_is_refused(family):
    with pytest.raises(ValueError, match="partition positions 0…3"):
        factorized(family.joints, ((0,), (1, 2), (2, 3)))


def test_definition_2(family):
    labels = coordinates(BLOCKS, (3,) * 4)
    composed = stepwise(family.joints).logp
    assert projective(composed, family.joints, labels).holds(EXACT)
    gap = projective(tilted(composed, (2,), 0.4), family.joints, labels)
    assert gap.value > 1e-4
    assert gap.witness["expert"] == 2


def test_definition_2_in_feature_space(family, generator):
    image = any_bijection([3] * 4, generator)
    labels = [torch.empty_like(x.flatten()).scatter(0, image, x.flatten()) for x in coordinates(BLOCKS, (3,) * 4)]
    moved = torch.stack([transport(logp, image) for logp in family.joints])
    composed = transport(stepwise(family.joints).logp, image)
    assert projective(composed, moved, [x.reshape((3,) * 4) for x in labels]).holds(EXACT)


@pytest.mark.parametrize("recur", [True, False])
def test_definitions_3_and_4_hold_and_planted_violations_are_found(generator, recur):
    family = skilled_family(3, 4, 3, generator, recur)
    assert skill_factorizable(family.joints, family.active).holds(EXACT)
    assert jointly_factorizable(family.joints, family.active).holds(EXACT)
    assert jointly_factorizable(family.joints).holds(EXACT)
    prefix, owner = next(
        (tuple(p.tolist()), int(family.owner[2][tuple(p)])) for p in torch.cartesian_prod(*[torch.arange(3)] * 2)
    )
    intruder = 1 + owner % 3
    broken = with_member(family.joints, intruder, tilted(family.joints[intruder], prefix, 0.25))
    found = skill_factorizable(broken, family.active)
    assert (found.witness["expert"], found.witness["prefix"]) == (intruder, prefix)
    assert 0.05 < found.value <= 0.25
    assert jointly_factorizable(broken, family.active).value >= found.value
    if owner:
        without_sets = jointly_factorizable(broken)
        assert set(without_sets.witness["experts"]) == {owner, intruder}
        assert without_sets.witness["position"] == 2


def test_definition_4_finds_active_sets_that_meet(generator):
    family = skilled_family(2, 3, 2, generator)
    joints = torch.stack([family.joints[0], family.joints[1], family.joints[1]])
    both = [torch.stack([mask[0], mask[0]]) for mask in family.active]
    assert skill_factorizable(joints, both).holds(EXACT)
    assert jointly_factorizable(joints, both).value > 0.1


def test_owners_keep_to_intervals_where_skills_do_not_recur(generator):
    owner = skilled_family(2, 6, 3, generator, recur=False).owner
    for path in torch.cartesian_prod(*[torch.arange(2)] * 5).tolist():
        runs = [int(owner[t][tuple(path[:t])]) for t in range(6)]
        entered = [now for before, now in zip([0, *runs], runs, strict=False) if now and now != before]
        assert len(entered) == len(set(entered))


def test_definition_1_is_a_case_of_definition_4(family):
    active = [torch.stack([owner == 1, owner == 2]) for owner in owners_of(family)]
    assert jointly_factorizable(family.joints, active).holds(EXACT)


def test_one_expert_is_always_jointly_factorizable(generator):
    assert jointly_factorizable(skilled_family(2, 3, 1, generator).joints).value == 0


@pytest.mark.parametrize("aligned", [True, False])
def test_perturbed_families_stay_within_epsilon(generator, aligned):
    family = perturbed(skilled_family(3, 4, 3, generator), 0.2, generator, aligned)
    gap = skill_factorizable(family.joints, family.active)
    assert 0.05 < gap.value <= 0.2


def test_definition_5():
    generator = torch.Generator().manual_seed(0)
    masks = torch.tensor([[1.0, 1, 0, 0, 0], [0, 0, 0, 1, 0]]).double()
    base = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    change = torch.randn(2, 5, 4, generator=generator, dtype=torch.float64)
    maps = torch.stack([base, *(base + masks.unsqueeze(-1) * change)])
    assert disjoint_coordinates(maps, masks).holds(EXACT)
    assert disjoint_coordinates(maps).holds(EXACT)
    maps[1, 3, 2] += 0.125
    assert disjoint_coordinates(maps, masks).value == pytest.approx(0.125)
    assert disjoint_coordinates(maps, masks).witness == {"expert": 1, "coordinate": 3}
    assert disjoint_coordinates(maps).witness == {"coordinate": 3, "experts": (2, 1)}
    assert disjoint_coordinates(maps, masks.flip(1)).value > 0.1
    assert disjoint_coordinates(maps, torch.ones_like(masks)).unit == "masks meet"
