"""Whom a mixture of laws believes. Knows beliefs, neither rules nor engines.

A rule that says a mixture of laws is, most of the time, nearly one of them: the others may read what was said later.

Shapes: M members, K experts, B batch, T time, L laws: the base, every expert, Eq. 2 over all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .protocol import Explanation

SUREST = 3


def believed_members(belief_BL: Tensor) -> tuple[Tensor, Tensor]:
    """Name per row the member whose own law is likeliest, and tell how sure the belief (log) is of it: 0 below .9,
    1 below .99, and so on up to SUREST: [B] each."""
    belief_B, member_B = belief_BL[:, :-1].max(-1)
    doubt_B = -torch.expm1(belief_B.double())
    return member_B, (-doubt_B.clamp(10.0**-SUREST, 1).log10()).floor().long()


def explanation(belief_BTL: Tensor, score_BTK: Tensor, log_z_BT: Tensor) -> Explanation:
    """Why each row came out as it did. In `more`:

    law_BTL     the belief over the base, every expert, and Eq. 2
    score_BTK   how far each expert acts beyond its habits (summed deviations)
    """
    law_BTL = belief_BTL.exp()
    member_BTM, equation_BT1 = law_BTL[..., :-1], law_BTL[..., -1:]
    experts = score_BTK.shape[-1]
    member_BTM = member_BTM + torch.nn.functional.pad(equation_BT1.expand_as(score_BTK) / experts, (1, 0))
    owner_BT = believed_owner(law_BTL, 0, 0 if experts > 1 else 1)
    return Explanation(member_BTM, owner_BT, log_z_BT, {"law_BTL": law_BTL, "score_BTK": score_BTK})


def believed_owner(law_BTL: Tensor, base: int, equation: int) -> Tensor:
    """The member whose law is believed most; `base` where that is the base's, `equation` where it is Eq. 2: [B, T]."""
    law_BT = law_BTL.argmax(-1)
    owner_BT = torch.where(law_BT == law_BTL.shape[-1] - 1, equation, law_BT)
    return torch.where(law_BT == 0, base, owner_BT)
