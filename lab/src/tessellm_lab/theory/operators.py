"""The two composition operators, on exact laws: Eq. 2 step by step, and C, which normalises once (Lemma 1).

M members, the base first   V vocabulary   n length   joints_M: log p_m(x), shape [M] + [V]*n
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tessellm.rules import product, product_scores

from .sequences import conditionals, joint


class Stepwise(NamedTuple):
    """What chaining Eq. 2 gives: the law of sequences, and log Z_t at every prefix, shapes [V]*t."""

    logp: Tensor
    log_z: list[Tensor]

    @property
    def largest_log_z(self) -> float:
        return max(float(log_z_P.abs().max()) for log_z_P in self.log_z)

    @property
    def log_weight(self) -> Tensor:
        """Σ_t log Z_t(x_<t) for every sequence: what Eq. 2 must be weighted by to be C."""
        n = self.logp.ndim
        parts = [log_z_P.reshape(*log_z_P.shape, *[1] * (n - t)) for t, log_z_P in enumerate(self.log_z)]
        return torch.stack([part.expand(self.logp.shape) for part in parts]).sum(0)


class Once(NamedTuple):
    """What C gives: the law of sequences, and the one log Z."""

    logp: Tensor
    log_z: float


def stepwise(joints_M: Tensor, weights_K: Sequence[float] | None = None) -> Stepwise:
    """Eq. 2 at every prefix: p̂(x) = Π_t p̂(x_t | x_<t)."""
    steps = zip(*(conditionals(logp) for logp in joints_M), strict=True)
    rows = [torch.stack(step) for step in steps]
    return Stepwise(
        joint([product(logp_MPV, weights_K) for logp_MPV in rows]),
        [product_scores(logp_MPV, weights_K).logsumexp(-1) for logp_MPV in rows],
    )


def once(joints_M: Tensor, weights_K: Sequence[float] | None = None) -> Once:
    """C: p(x) ∝ p_b(x) Π_i (p_i(x)/p_b(x))^w_i over whole sequences."""
    score_N = product_scores(joints_M.flatten(1), weights_K)
    log_z = score_N.logsumexp(0)
    return Once((score_N - log_z).reshape(joints_M.shape[1:]), float(log_z))
