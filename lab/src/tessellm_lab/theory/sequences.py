"""Distributions over all sequences of n tokens, exactly: log-probabilities in float64, one axis per position.

`logp[x_1, …, x_n]` is log p(x). Everything has full support, as the paper assumes; that is checked, not repaired.
Knows nothing of members or rules.

    V vocabulary   n length   P a prefix's axes [V]*t   N all Vⁿ sequences, flat
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

NORMALISED = 1e-9


def check_joint(logp: Tensor) -> Tensor:
    """The same tensor, if it is a distribution with full support in float64."""
    total = float(logp.flatten().logsumexp(0)) if logp.dtype == torch.float64 else float("nan")
    if not abs(total) < NORMALISED or not bool(logp.isfinite().all()):
        raise ValueError(
            f"expected finite float64 log-probabilities that sum to one (every sequence possible); got {logp.dtype}, "
            f"log of the sum {total:.3g}, {int((~logp.isfinite()).sum())} entries not finite"
        )
    return logp


def marginal(logp: Tensor, positions: Sequence[int]) -> Tensor:
    """The law of the tokens at those positions, in their order of time."""
    others = [axis for axis in range(logp.ndim) if axis not in set(positions)]
    return logp.logsumexp(others) if others else logp


def conditionals(logp: Tensor) -> list[Tensor]:
    """log p(x_t | x_<t) for every t, as tensors of shape [V]*t + [V]."""
    prefixes = [marginal(logp, range(t)) for t in range(logp.ndim + 1)]
    return [after - before.unsqueeze(-1) for before, after in pairwise(prefixes)]


def joint(conditionals: Sequence[Tensor]) -> Tensor:
    """The chain rule: back from conditionals to the law of whole sequences."""
    logp = torch.zeros((), dtype=torch.float64)
    for logp_PV in conditionals:
        logp = logp.unsqueeze(-1) + logp_PV
    return logp


def prefix_laws(logp: Tensor) -> list[Tensor]:
    """log p(x_<t) for t = 1 … n: how likely every prefix is."""
    return [marginal(logp, range(t)) for t in range(logp.ndim)]


def independent(parts: Sequence[tuple[Sequence[int], Tensor]], length: int) -> Tensor:
    """The product of laws on disjoint sets of positions that cover 0 … length−1."""
    logp = torch.zeros((), dtype=torch.float64)
    for positions, part in parts:
        shape = [1] * length
        for axis, size in zip(sorted(positions), part.shape, strict=True):
            shape[axis] = size
        logp = logp + part.reshape(shape)
    return logp


def pushforward(logp: Tensor, labels: Tensor, count: int | None = None) -> Tensor:
    """The law of a function of the sequence, given as an integer for each sequence. Labels nobody has get −inf."""
    size = count or int(labels.max()) + 1
    flat = logp.flatten()
    return torch.zeros(size, dtype=flat.dtype).index_add(0, labels.flatten(), flat.exp()).log()


def transport(logp: Tensor, image: Tensor) -> Tensor:
    """D#p for an invertible D: sequence number x goes to sequence number image[x]."""
    flat = logp.flatten()
    return torch.empty_like(flat).scatter(0, image.flatten(), flat).reshape(logp.shape)


def total_variation(logp: Tensor, logq: Tensor) -> float:
    """½ Σ |p − q|."""
    return 0.5 * float((logp.exp() - logq.exp()).abs().sum())


def kl_divergence(logp: Tensor, logq: Tensor) -> float:
    """KL(p‖q) in nats."""
    return float((logp.exp() * (logp - logq)).sum())


def sequence_at(number: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The tokens of the sequence with that number in flat order."""
    tokens = []
    for size in reversed(shape):
        number, token = divmod(number, size)
        tokens.append(token)
    return tuple(reversed(tokens))


def random_joint(shape: Sequence[int], generator: torch.Generator, sharpness: float = 1.5) -> Tensor:
    """A random law with full support: a softmax of Gaussian scores."""
    scores = sharpness * torch.randn(*shape, generator=generator, dtype=torch.float64)
    return scores.flatten().log_softmax(0).reshape(scores.shape)
