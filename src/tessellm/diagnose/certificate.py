"""The certificate: how far what a composition writes can be from what its owners would write, by theory and measured ε.

Along a text, Σ_t KL(p̂ ‖ nearest member) is the gap, and Σ_t of the theorem's bound what the measured ε allow for it
(docs/theory.md; rules other than Eq. 2: row_statistics.py). On texts that the composition wrote, their mean
estimates the divergence between the two laws of whole texts. Half of it, under a root, bounds the total variation
(Pinsker): a share of texts. At 1 or more it says nothing, and is called vacuous.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .interference import Rows
from .rates import new_text_limit

NEW_TEXT = 0.9  # how often a new text stays within the limit for unseen texts


@dataclass(frozen=True)
class TextBound:
    """One text: nats."""

    gap: float
    bound: float
    tokens: int

    @property
    def vacuous(self) -> bool:
        return as_share(self.bound) >= 1


@dataclass(frozen=True)
class Certificate:
    """Measured ε of every expert (median, 95 %, largest; nats), and what follows from them."""

    epsilon: dict[str, tuple[float, float, float]]
    texts: tuple[TextBound, ...]
    gap: float  # mean over texts, nats
    bound: float
    gap_share: float  # √(gap / 2): at most this share of texts differs
    bound_share: float
    unseen_gap: float  # a new text of the same kind stays within this, with probability NEW_TEXT
    unseen_bound: float
    vacuous_texts: int

    @property
    def vacuous(self) -> bool:
        return self.bound_share >= 1

    @property
    def holds(self) -> bool:
        """On every text seen. False would be a bug, or numbers beyond float32."""
        return all(text.gap <= text.bound * (1 + 1e-3) + 1e-3 * text.tokens for text in self.texts)


def certificate(rows: Rows, members: Sequence[str]) -> Certificate:
    gap_B, bound_B = rows.sums(rows["gap_kl"]), rows.sums(rows["bound"])
    count_B = rows.sums(torch.ones(len(rows.text_R))).int()
    texts = tuple(map(TextBound, gap_B.tolist(), bound_B.tolist(), count_B.tolist()))
    epsilon_RK = rows["epsilon"]
    gap, bound = float(gap_B.mean()), float(bound_B.mean())
    return Certificate(
        epsilon={name: spread(epsilon_RK[:, i]) for i, name in enumerate(members[1:])},
        texts=texts,
        gap=gap,
        bound=bound,
        gap_share=as_share(gap),
        bound_share=as_share(bound),
        unseen_gap=new_text_limit(gap_B, NEW_TEXT),
        unseen_bound=new_text_limit(bound_B, NEW_TEXT),
        vacuous_texts=sum(text.vacuous for text in texts),
    )


def as_share(nats: float) -> float:
    """Pinsker: total variation from a divergence, at most 1."""
    return min(1.0, (nats / 2) ** 0.5)


def spread(value_R: Tensor) -> tuple[float, float, float]:
    ordered = value_R.sort().values.tolist()
    return ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))], ordered[-1]
