"""Planted violations: each definition's check must see them, and say where they are."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..common.claims import Claim
from ..theory import definitions
from ..theory.definitions import coordinates
from ..theory.families import Skilled, factorized_family, skilled_family, tilted, with_member
from ..theory.operators import stepwise

VISIBLE = 1e-10


def planted_claims(count: int, generator: torch.Generator) -> Iterator[Claim]:
    """A violation is planted in a family that had none; the check must see it, where it is."""
    plants = {"1": _plant_1, "2": _plant_2, "3": _plant_3, "4": _plant_4, "5": _plant_5}
    for definition, plant in plants.items():
        found = sum(plant(generator) for _ in range(count)) / count
        statement = f"Def. {definition}: share of planted violations that the check finds and places ({count} families)"
        yield Claim(f"planted-{definition}", statement, found, "1.0", found == 1.0)


def integer(low: int, high: int, generator: torch.Generator) -> int:
    return int(torch.randint(low, high + 1, (), generator=generator))


def linear_family(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    k, rows, columns = integer(1, 5, generator), integer(2, 12, generator), integer(1, 12, generator)
    owner = torch.randint(k + 1, (rows,), generator=generator)
    masks = torch.stack([(owner == i).double() for i in range(1, k + 1)])
    base, change = (torch.randn(n, rows, columns, generator=generator, dtype=torch.float64) for n in (1, k))
    return torch.cat([base, base + masks.unsqueeze(-1) * change]), masks


def _plant_1(generator: torch.Generator) -> bool:
    """Expert 1 is tilted after one prefix at a position that expert 2 owns."""
    family = factorized_family([3] * 4, 2, generator, ((0,), (1,), (2, 3)))
    position = integer(2, 3, generator)
    prefix = torch.randint(3, (position,), generator=generator).tolist()
    broken = with_member(family.joints, 1, tilted(family.joints[1], prefix, 0.2))
    gap = definitions.factorized(broken, family.blocks)
    return gap.value > VISIBLE and gap.witness["expert"] == 1 and definitions.find_partition(broken) is None


def _plant_2(generator: torch.Generator) -> bool:
    """The composition is tilted at expert 2's position."""
    family = factorized_family([3] * 3, 2, generator, ((0,), (1,), (2,)))
    prefix = torch.randint(3, (2,), generator=generator).tolist()
    law = tilted(stepwise(family.joints).logp, prefix, 0.2)
    gap = definitions.projective(law, family.joints, coordinates(family.blocks, (3,) * 3))
    return gap.value > VISIBLE and gap.witness["expert"] == 2


def _plant_3(generator: torch.Generator) -> bool:
    family, prefix, _, intruder = _intruded(generator)
    gap = definitions.skill_factorizable(family.joints, family.active)
    return gap.value > VISIBLE and gap.witness["prefix"] == prefix and gap.witness["expert"] == intruder


def _plant_4(generator: torch.Generator) -> bool:
    family, prefix, owner, intruder = _intruded(generator)
    gap = definitions.jointly_factorizable(family.joints)
    return gap.value > VISIBLE and gap.witness["prefix"] == prefix and set(gap.witness["experts"]) == {owner, intruder}


def _intruded(generator: torch.Generator) -> tuple[Skilled, tuple[int, ...], int, int]:
    """A family in which, after one prefix that somebody owns, another expert speaks, too."""
    while True:
        family = skilled_family(3, 4, 3, generator)
        prefix = tuple(torch.randint(3, (integer(0, 3, generator),), generator=generator).tolist())
        owner = int(family.owner[len(prefix)][prefix])
        if owner:
            intruder = 1 + owner % 3
            law = tilted(family.joints[intruder], prefix, 0.2)
            return Skilled(with_member(family.joints, intruder, law), family.owner), prefix, owner, intruder


def _plant_5(generator: torch.Generator) -> bool:
    maps, masks = linear_family(generator)
    row, column = integer(0, maps.shape[1] - 1, generator), integer(0, maps.shape[2] - 1, generator)
    expert = next((i for i in range(1, len(maps)) if not masks[i - 1, row]), None)
    if expert is None:  # the only expert owns this coordinate
        return definitions.disjoint_coordinates(maps, masks).value == 0
    maps[expert, row, column] += 0.2
    gap = definitions.disjoint_coordinates(maps, masks)
    return gap.value > VISIBLE and gap.witness == {"expert": expert, "coordinate": row}
