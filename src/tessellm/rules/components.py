"""The mixture of products: how the default rule combines members. Pure functions; knows no rule object and no model.

    p̂(v) = Σ_c π_c · p_c(v)        p_c ∝ p_0 · Π_i (p_i / p_0)^W_ci

A component c is Eq. 2 with the weights of one row of W: all zero is the base, one-hot is that expert alone, all ones is
the paper's composition. A column that is non-zero in every row is a style. π begins at the router's prior and follows
Bayes with a switching probability ρ:

    π_c ← (1 − ρ) · π_c p_c(token) / Σ_d π_d p_d(token) + ρ · π⁰_c

**Guarantee** (fixed share, Herbster and Warmuth 1998). On any text of n tokens, and for any sequence of components
c_1 … c_n that changes s times,

    −log p̂(text) ≤ −Σ_t log p_{c_t}(token_t) + log(1/π⁰_{c_1}) + Σ_switches log(1/(ρ π⁰_{c_t})) + (n−1−s) · log(1/(1−ρ))

because p̂(text) is a sum over all sequences of components of prior times likelihood, and one term of a sum of
non-negative terms is at most the sum: a step stays with probability at least 1 − ρ and enters c with at least ρ π⁰_c.

Shapes: M members (0 is the base), C components, B batch, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .equation import product, working_dtype

SWITCH_PROB = 0.01  # ρ: chosen on written answers


def component_weights(experts: Sequence[int], count: int, styles: Sequence[int] = ()) -> Tensor:
    """W over `count` experts, [C, K]: the base, each of the experts numbered (1 is the first), and Eq. 2 of them where
    there is more than one; styles count 1 in every row."""
    rows = [[], *([expert] for expert in experts), *([list(experts)] if len(experts) > 1 else [])]
    weights_CK = torch.zeros(len(rows), count)
    for row, members in enumerate(rows):
        weights_CK[row, [member - 1 for member in (*members, *styles)]] = 1.0
    return weights_CK


def component_logp(logp_MBV: Tensor, weights_CK: Tensor) -> Tensor:
    """Return log p_c of every component, [C, B, V]. The base and a lone expert are that member to the last bit; what
    other members compute does not matter."""
    rows = []
    for weight_K in weights_CK.tolist():
        members = [place for place, weight in enumerate(weight_K, 1) if weight]
        if not members:
            rows.append(logp_MBV[0])
        elif len(members) == 1 and weight_K[members[0] - 1] == 1:
            rows.append(logp_MBV[members[0]])
        else:
            rows.append(product(logp_MBV[[0, *members]], [weight_K[place - 1] for place in members]))
    return torch.stack([row.to(working_dtype(row)) for row in rows])


def mix(logp_MBV: Tensor, weights_CK: Tensor, log_pi_BC: Tensor) -> Tensor:
    """Return log p̂, [B, V]. A component whose π is 0 is left out, whatever it computes; a lone one is itself."""
    return mix_components(component_logp(logp_MBV, weights_CK), log_pi_BC)


def mix_components(logp_CBV: Tensor, log_pi_BC: Tensor) -> Tensor:
    """Return log Σ_c π_c p_c, [B, V], of components that are computed already."""
    log_pi_CB1 = log_pi_BC.to(logp_CBV.dtype).T[..., None]
    silent_CB1 = log_pi_CB1 == -torch.inf
    return (logp_CBV.masked_fill(silent_CB1, -torch.inf) + log_pi_CB1.masked_fill(silent_CB1, 0.0)).logsumexp(0)


def update(log_pi_BC: Tensor, loglik_BC: Tensor, prior_BC: Tensor, switch_prob: float = SWITCH_PROB) -> Tensor:
    """Return log π after a token: Bayes, then a share ρ goes back to the prior (given as probabilities). Where no
    component thought the token possible, π returns to the prior."""
    joint_BC = torch.where(log_pi_BC == -torch.inf, -torch.inf, log_pi_BC + loglik_BC)
    impossible_B1 = joint_BC.amax(-1, keepdim=True) == -torch.inf
    posterior_BC = torch.where(impossible_B1, prior_BC.log(), joint_BC).softmax(-1)
    return ((1 - switch_prob) * posterior_BC + switch_prob * prior_BC).log()
