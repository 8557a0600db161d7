"""The certificate: how far what Eq. 2 writes can be from what its owners would write, by theory and measured ε.

Along a text, Σ_t KL(p̂ ‖ nearest member) is the gap, and Σ_t min(2a_t, a_t²/2) the theorem's bound on it: a_t is the sum
of ε over all experts but the loudest (docs/theory.md). On texts that the composition wrote, their mean estimates the
divergence between the two distributions of whole texts. Half of it, under a root, bounds the total variation (Pinsker):
a share of texts. At 1 or more it says nothing, and is called vacuous.

Shapes: R rows (scored tokens of all texts), K experts, B texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tessellm.diagnose import Trace
from tessellm.diagnose.interference import rows_of

NEW_TEXT = 0.9  # how often a new text stays within the limit for unseen texts


@dataclass(frozen=True)
class Certificate:
    """Of every text its gap and the bound on it, and what follows; nats."""

    gaps: tuple[float, ...]
    bounds: tuple[float, ...]
    tokens: tuple[int, ...]
    bound_share: float  # √(mean bound / 2): at most this share of texts differs
    unseen_gap: float  # a new text of the same kind stays within this, with probability NEW_TEXT

    @property
    def vacuous(self) -> bool:
        return self.bound_share >= 1

    @property
    def holds(self) -> bool:
        """On every text seen. False would be a bug, or numbers beyond float32."""
        each = zip(self.gaps, self.bounds, self.tokens, strict=True)
        return all(gap <= bound * (1 + 1e-3) + 1e-3 * tokens for gap, bound, tokens in each)


def certificate(traces: Sequence[Trace]) -> Certificate:
    """Certify texts that a composition by Eq. 2 wrote; each trace holds one."""
    rows = rows_of(traces)
    bound_B = rows.sums(gap_bound(idle(rows["epsilon"])))
    gap_B, count_B = rows.sums(rows["gap_kl"]), rows.sums(torch.ones(len(rows.text_R)))
    gaps, bounds, counts = (tuple(each.tolist()) for each in (gap_B, bound_B, count_B.int()))
    share = min(1.0, (float(bound_B.mean()) / 2) ** 0.5)
    return Certificate(gaps, bounds, counts, share, new_text_limit(gap_B, NEW_TEXT))


def idle(epsilon_RK: Tensor) -> Tensor:
    """a_t: what all experts but the loudest bring in."""
    expert_K = torch.arange(epsilon_RK.shape[-1])
    return torch.where(expert_K == epsilon_RK.argmax(-1, keepdim=True), 0.0, epsilon_RK).sum(-1)


def gap_bound(idle_R: Tensor) -> Tensor:
    """KL(p̂ ‖ ideal) ≤ min(2a, a²/2)."""
    return torch.minimum(2 * idle_R, idle_R.square() / 2)


def new_text_limit(value_B: Tensor, confidence: float = NEW_TEXT) -> float:
    """What a new text stays within, with that probability, if it is exchangeable with those seen, whatever their
    distribution: the ⌈(B+1)·confidence⌉-th smallest value. Infinite where there are too few texts to say."""
    rank = -int(-(len(value_B) + 1) * confidence // 1)
    return float(value_B.sort().values[rank - 1]) if rank <= len(value_B) else float("inf")
