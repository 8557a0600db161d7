"""Whom a mixture of laws believes. Knows beliefs, neither rules nor engines.

A rule that says a mixture of laws is, most of the time, nearly one of them: the others may read what was said later.

Shapes: B batch, L laws: the base, every expert, Eq. 2 over all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

SUREST = 3


def believed_members(belief_BL: Tensor) -> tuple[Tensor, Tensor]:
    """Name per row the member whose own law is likeliest, and tell how sure the belief (log) is of it: 0 below .9,
    1 below .99, and so on up to SUREST: [B] each."""
    belief_B, member_B = belief_BL[:, :-1].max(-1)
    doubt_B = -torch.expm1(belief_B.double())
    return member_B, (-doubt_B.clamp(10.0**-SUREST, 1).log10()).floor().long()
