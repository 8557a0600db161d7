"""Random families of laws that satisfy the paper's hypotheses, exactly or up to a chosen ε.

A family is a base and experts over the same sequences, with what makes the hypothesis true: the partition (Definition
1) or the owner of every prefix (Definition 4). Everything is drawn from the generator that is passed in.

    M members   K experts   V vocabulary   n length   P a prefix's axes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .sequences import conditionals, independent, joint, marginal, random_joint


@dataclass(frozen=True)
class Factorized:
    """Definition 1: laws `joints`, shape [M] + [V]*n, and the blocks of positions, the base's first."""

    joints: Tensor
    blocks: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Skilled:
    """Definition 4: laws, and who acts after each prefix: `owner[t]` of shape [V]*t, 0 where the base does."""

    joints: Tensor
    owner: list[Tensor]

    @property
    def active(self) -> list[Tensor]:
        """Booleans of shape [K] + [V]*t, as the checks take them."""
        experts = len(self.joints) - 1
        return [torch.stack([owner_P == i for i in range(1, experts + 1)]) for owner_P in self.owner]


def random_partition(length: int, experts: int, generator: torch.Generator) -> tuple[tuple[int, ...], ...]:
    """Every position goes to the base or to an expert, in any order; an expert may own none."""
    member_n = torch.randint(experts + 1, (length,), generator=generator).tolist()
    return tuple(tuple(t for t in range(length) if member_n[t] == m) for m in range(experts + 1))


def factorized_family(
    sizes: Sequence[int],
    experts: int,
    generator: torch.Generator,
    blocks: tuple[tuple[int, ...], ...] | None = None,
    sharpness: float = 1.5,
) -> Factorized:
    """Definition 1. `sizes` is the vocabulary of every position.

    Under the base blocks are independent, and inside a block anything goes. An expert redraws its own block's law and
    keeps the base's on the others. Then at a position of block j every member's conditional is a function of block
    j's earlier tokens alone, wherever those stand: this is what lets the ratios cancel at every prefix.
    """
    n = len(sizes)
    blocks = blocks or random_partition(n, experts, generator)

    def draw(block: Sequence[int]) -> Tensor:
        return random_joint([sizes[t] for t in block], generator, sharpness)

    base = {m: draw(block) for m, block in enumerate(blocks) if block}
    laws = [independent([(blocks[m], law) for m, law in base.items()], n)]
    for expert in range(1, experts + 1):
        own = {**base, expert: draw(blocks[expert])} if blocks[expert] else base
        laws.append(independent([(blocks[m], law) for m, law in own.items()], n))
    return Factorized(torch.stack(laws), blocks)


def random_owners(
    vocabulary: int, length: int, experts: int, generator: torch.Generator, stay: float = 0.6, recur: bool = True
) -> list[Tensor]:
    """Who acts after each prefix, as intervals along every path: the owner stays with probability `stay`.

    Where skills may not recur, a new owner is one that the path has not seen, or the base.
    """
    owner_P = torch.randint(experts + 1, (), generator=generator)
    seen_PM = torch.nn.functional.one_hot(owner_P, experts + 1).bool()
    owners = [owner_P]
    for _ in range(1, length):
        owner_P = owner_P.unsqueeze(-1).expand(*owner_P.shape, vocabulary)
        seen_PM = seen_PM.unsqueeze(-2).expand(*owner_P.shape, experts + 1)
        free_PM = torch.ones_like(seen_PM) if recur else ~seen_PM
        free_PM = free_PM | (torch.arange(experts + 1) == 0)
        score_PM = torch.rand(seen_PM.shape, generator=generator).masked_fill(~free_PM, -1.0)
        stays_P = torch.rand(owner_P.shape, generator=generator) < stay
        owner_P = torch.where(stays_P, owner_P, score_PM.argmax(-1))
        seen_PM = seen_PM | torch.nn.functional.one_hot(owner_P, experts + 1).bool()
        owners.append(owner_P)
    return owners


def skilled_family(
    vocabulary: int, length: int, experts: int, generator: torch.Generator, recur: bool = True, sharpness: float = 1.5
) -> Skilled:
    """Definition 4: wherever a prefix is owned by expert i, that expert alone departs from the base."""
    owners = random_owners(vocabulary, length, experts, generator, recur=recur)

    def draw(t: int) -> Tensor:
        return (sharpness * torch.randn([vocabulary] * (t + 1), generator=generator, dtype=torch.float64)).log_softmax(
            -1
        )

    base = [draw(t) for t in range(length)]
    laws = [joint(base)]
    for expert in range(1, experts + 1):
        rows = [torch.where((owners[t] == expert).unsqueeze(-1), draw(t), base[t]) for t in range(length)]
        laws.append(joint(rows))
    return Skilled(torch.stack(laws), owners)


def perturbed(family: Skilled, epsilon: float, generator: torch.Generator, aligned: bool = False) -> Skilled:
    """The same family with every idle expert within ε of the base, in sup log-ratio; owners and base stay exact.

    Noise h in [−ε/2, ε/2] multiplies the base's probabilities by eʰ/E[eʰ], which is in [e^−ε, e^ε]. Aligned noise
    is the same for every expert and ±ε/2 only, so that it adds up as the bound allows.
    """
    base, *experts = (conditionals(logp) for logp in family.joints)
    noise = [_noise(row_PV.shape, epsilon, generator, aligned) for row_PV in base]
    laws = [family.joints[0]]
    for expert, rows in enumerate(experts, 1):
        own = noise if aligned else [_noise(row_PV.shape, epsilon, generator, False) for row_PV in base]
        idle = [(base[t] + own[t]).log_softmax(-1) for t in range(len(rows))]
        laws.append(
            joint([torch.where((family.owner[t] == expert).unsqueeze(-1), rows[t], idle[t]) for t in range(len(rows))])
        )
    return Skilled(torch.stack(laws), family.owner)


def _noise(shape: Sequence[int], epsilon: float, generator: torch.Generator, extreme: bool) -> Tensor:
    noise = torch.rand(tuple(shape), generator=generator, dtype=torch.float64) - 0.5
    return epsilon * (0.5 * noise.sign() if extreme else noise)


def tilted(logp: Tensor, prefix: Sequence[int], by: float, token: int = 0) -> Tensor:
    """A planted violation: the same law with one token made eᵇʸ times as likely, relatively, after one prefix."""
    rows = conditionals(logp)
    change = torch.zeros_like(rows[len(prefix)])
    change[(*prefix, token)] = by
    rows[len(prefix)] = (rows[len(prefix)] + change).log_softmax(-1)
    return joint(rows)


def with_member(joints_M: Tensor, member: int, logp: Tensor) -> Tensor:
    """The same family with another law for one member."""
    return torch.stack([logp if m == member else old for m, old in enumerate(joints_M)])


def owners_of(family: Factorized) -> list[Tensor]:
    """Definition 1 as a case of Definition 4: a position's owner, whatever the prefix."""
    sizes = family.joints.shape[1:]
    member = {position: m for m, block in enumerate(family.blocks) for position in block}
    return [torch.full(tuple(sizes[:t]), member[t]) for t in range(len(sizes))]


def tightest_family(epsilon: float, experts: int, length: int = 1) -> Skilled:
    """Nobody acts, and every expert is exactly ε from the base in both directions: the bounds are nearly met.

    Two tokens; the base gives the first 1/(1+e^ε); every expert multiplies it by e^ε and the second by e^−ε.
    """
    eps = torch.tensor(epsilon, dtype=torch.float64)
    base_V = torch.stack([-eps, torch.zeros_like(eps)]).log_softmax(0)
    expert_V = base_V.flip(0)
    laws = [joint([row.expand([2] * (t + 1)) for t in range(length)]) for row in [base_V] + [expert_V] * experts]
    return Skilled(torch.stack(laws), [torch.zeros([2] * t, dtype=torch.long) for t in range(length)])


def keep_prefixes(sizes: Sequence[int], generator: torch.Generator) -> Tensor:
    """An invertible D that keeps prefixes: after every prefix its own permutation of the next token.

    Returned as the image of every sequence number; D(x)_≤t and x_≤t determine each other for every t.
    """
    image_N = torch.zeros(1, dtype=torch.long)
    for size in sizes:
        order_NV = torch.rand(len(image_N), size, generator=generator).argsort(-1)
        image_N = (image_N.unsqueeze(-1) * size + order_NV).flatten()
    return image_N


def any_bijection(sizes: Sequence[int], generator: torch.Generator) -> Tensor:
    """A random permutation of all sequences: the general D of Lemma 1, which keeps nothing."""
    return torch.randperm(int(torch.tensor(list(sizes)).prod()), generator=generator)


def two_bits(strength: float = 0.9) -> tuple[Tensor, list[Tensor]]:
    """The counter-example: uniform base on two bits, f₁ = x₁⊕x₂, f₂ = x₂; expert i makes f_i Bernoulli(strength).

    Returns the laws [3, 2, 2] and the features f_i as labels.
    """
    x1, x2 = torch.meshgrid(torch.arange(2), torch.arange(2), indexing="ij")
    features = [x1 ^ x2, x2]
    up, down = (torch.tensor(p, dtype=torch.float64).log() for p in (strength / 2, (1 - strength) / 2))
    base = torch.full((2, 2), 0.25, dtype=torch.float64).log()
    return torch.stack([base, *(torch.where(f == 1, up, down) for f in features)]), features


def marginal_on(logp: Tensor, block: Sequence[int]) -> Tensor:
    """The law on one block; a scalar zero for an empty one."""
    return marginal(logp, block) if block else logp.flatten().logsumexp(0)
