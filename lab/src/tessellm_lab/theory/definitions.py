"""Definitions 1–5 of the paper as measurements: how far from holding, and where it is worst.

Every check returns a `Gap`: a number that is zero where the definition holds, its unit, and a witness. Laws are exact
(see `sequences`); for models too large to enumerate, see `sampled`. Positions count from 0, experts from 1.

    M members, the base first   V vocabulary   P a prefix's axes   joints_M: shape [M] + [V]*n
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from .sequences import conditionals, independent, marginal, pushforward, sequence_at, total_variation

Partition = Sequence[Sequence[int]]
"""Blocks of positions: the base's first, then one an expert."""


@dataclass(frozen=True)
class Gap:
    """How far something is from holding. `witness` says where it is worst."""

    value: float
    unit: str
    witness: Mapping[str, Any] = field(default_factory=dict)

    def holds(self, tolerance: float = 1e-10) -> bool:
        return self.value <= tolerance


def worst(gaps: Sequence[Gap]) -> Gap:
    return max(gaps, key=lambda gap: gap.value)


def law_gap(logp: Tensor, logq: Tensor, **where: Any) -> Gap:
    """Total variation between two laws, and the outcome whose probability differs most."""
    number = int((logp.exp() - logq.exp()).abs().argmax())
    return Gap(total_variation(logp, logq), "total variation", {**where, "outcome": sequence_at(number, logp.shape)})


def factorized(joints_M: Tensor, blocks: Partition) -> Gap:
    """Definition 1 for that partition: the worst of its three conditions, in total variation."""
    base, length = joints_M[0], joints_M.ndim - 1
    if sorted(p for block in blocks for p in block) != list(range(length)) or len(blocks) != len(joints_M):
        raise ValueError(f"expected {len(joints_M)} blocks that partition positions 0…{length - 1}; got {blocks}")
    parts = [(block, marginal(base, block)) for block in blocks if block]
    gaps = [law_gap(base, independent(parts, length), condition="blocks independent under the base")]
    for expert, block in enumerate(blocks[1:], 1):
        rest, logp = [p for p in range(length) if p not in block], joints_M[expert]
        if block and rest:
            split = independent([(block, marginal(logp, block)), (rest, marginal(logp, rest))], length)
            gaps.append(law_gap(logp, split, condition="block and rest independent under the expert", expert=expert))
        if rest:
            where = {"condition": "expert equals base outside its block", "expert": expert, "positions": rest}
            gaps.append(law_gap(marginal(logp, rest), marginal(base, rest), **where))
    return worst(gaps)


def find_partition(joints_M: Tensor, tolerance: float = 1e-9) -> tuple[tuple[int, ...], ...] | None:
    """The finest partition for which Definition 1 holds, or None where no partition does.

    Blocks are independent exactly if no member's conditional at t depends on a token outside t's block, so blocks are
    unions of connected components of the graph of such dependences. An expert must own every component in which it
    differs from the base at some prefix; two owners of one component rule every partition out.
    """
    length = joints_M.ndim - 1
    rows = [conditionals(logp) for logp in joints_M]
    component = list(range(length))
    for s, t in combinations(range(length), 2):
        if any(float(_range(row[t], s).max()) > tolerance for row in rows):
            old, new = component[t], component[s]
            component = [new if c == old else c for c in component]
    owner: dict[int, int] = {}
    for expert, row in enumerate(rows[1:], 1):
        for t in range(length):
            differs = float((row[t] - rows[0][t]).abs().max()) > tolerance
            if differs and owner.setdefault(component[t], expert) != expert:
                return None
    blocks = (tuple(t for t in range(length) if owner.get(component[t], 0) == member) for member in range(len(rows)))
    return tuple(blocks)


def _range(logp_PV: Tensor, axis: int) -> Tensor:
    """How much a conditional moves as the token at one position of the prefix varies."""
    return logp_PV.amax(axis) - logp_PV.amin(axis)


def projective(logp: Tensor, joints_M: Tensor, projections: Sequence[Tensor]) -> Gap:
    """Definition 2: the worst total variation between Π_i#p̂ and Π_i#p_i. A projection is a label for each sequence."""
    gaps = []
    for expert, labels in enumerate(projections, 1):
        count = int(labels.max()) + 1
        ours, theirs = (pushforward(law, labels, count) for law in (logp, joints_M[expert]))
        gaps.append(law_gap(ours, theirs, expert=expert))
    return worst(gaps)


def coordinates(blocks: Partition, shape: Sequence[int]) -> list[Tensor]:
    """The projections x ↦ x|M_i for the experts' blocks, as labels."""
    grid = torch.stack(torch.meshgrid(*(torch.arange(size) for size in shape), indexing="ij"))
    labels = []
    for block in blocks[1:]:
        label = torch.zeros(tuple(shape), dtype=torch.long)
        for position in block:
            label = label * shape[position] + grid[position]
        labels.append(label)
    return labels


def divergences(joints_M: Tensor) -> list[Tensor]:
    """sup_v |log p_i − log p_b| at every prefix: tensors of shape [K] + [V]*t."""
    base, *experts = (conditionals(logp) for logp in joints_M)
    steps = zip(base, *experts, strict=True)
    return [torch.stack([(p - step[0]).abs().amax(-1) for p in step[1:]]) for step in steps]


def skill_factorizable(joints_M: Tensor, active: Sequence[Tensor]) -> Gap:
    """Definition 3: the largest log-ratio to the base of an expert that should be idle.

    `active[t]` says, for every expert and prefix of length t, whether the expert acts: booleans of shape [K] + [V]*t. A
    function of the prefix is what stopping times are; skills may recur.
    """
    idle = [sup_KP.masked_fill(mask_KP, 0.0) for sup_KP, mask_KP in zip(divergences(joints_M), active, strict=True)]
    return worst([_prefix_gap(sup_KP, "expert") for sup_KP in idle])


def jointly_factorizable(joints_M: Tensor, active: Sequence[Tensor] | None = None) -> Gap:
    """Definition 4, in nats.

    With active sets: Definition 3, and wherever two of them meet, the log-ratio of the second expert there. Without:
    the least that any choice of active sets leaves: at the worst prefix, the second largest sup log-ratio.
    """
    if active is not None:
        meeting = [
            second_largest(sup_KP.masked_fill(~mask_KP, 0.0))
            for sup_KP, mask_KP in zip(divergences(joints_M), active, strict=True)
        ]
        return worst([skill_factorizable(joints_M, active), *(_second_gap(*found) for found in meeting)])
    return worst([_second_gap(*second_largest(sup_KP)) for sup_KP in divergences(joints_M)])


def second_largest(sup_KP: Tensor) -> tuple[Tensor, Tensor]:
    """The second largest along the experts, and the two experts (counted from 1), shapes P and [2] + P."""
    if len(sup_KP) == 1:
        return torch.zeros_like(sup_KP[0]), torch.ones(2, *sup_KP.shape[1:], dtype=torch.long)
    values, index = sup_KP.topk(2, dim=0)
    return values[1], index + 1


def _second_gap(second_P: Tensor, experts_2P: Tensor) -> Gap:
    number = int(second_P.argmax())
    prefix = sequence_at(number, second_P.shape)
    experts = tuple(experts_2P.reshape(2, -1)[:, number].tolist())
    return Gap(float(second_P.max()), "nats", {"prefix": prefix, "position": len(prefix), "experts": experts})


def _prefix_gap(sup_KP: Tensor, name: str) -> Gap:
    expert, *prefix = sequence_at(int(sup_KP.argmax()), sup_KP.shape)
    return Gap(float(sup_KP.max()), "nats", {name: expert + 1, "prefix": tuple(prefix), "position": len(prefix)})


def disjoint_coordinates(maps_M: Tensor, masks_K: Tensor | None = None) -> Gap:
    """Definition 5 for linear maps W_m, shape [M, out, in].

    With 0/1 masks [K, out]: the largest entry of (I − M_i)(W_i − W_b), or 1 where masks meet. Without: the least that
    any masks leave, the second largest change of one output coordinate.
    """
    change_KO = (maps_M[1:] - maps_M[0]).abs().amax(-1)
    if masks_K is None:
        second_O, experts_2O = second_largest(change_KO)
        row = int(second_O.argmax())
        experts = tuple(experts_2O[:, row].tolist())
        return Gap(float(second_O[row]), "largest entry", {"coordinate": row, "experts": experts})
    for (i, one), (j, other) in combinations(enumerate(masks_K, 1), 2):
        if bool((one * other).any()):
            return Gap(1.0, "masks meet", {"coordinate": int((one * other).argmax()), "experts": (i, j)})
    outside_KO = change_KO * (1 - masks_K)
    expert, row = sequence_at(int(outside_KO.argmax()), outside_KO.shape)
    return Gap(float(outside_KO.max()), "largest entry", {"expert": expert + 1, "coordinate": row})
