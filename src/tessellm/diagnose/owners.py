"""Whose word a token is: what traces colour and reports count."""

from __future__ import annotations

import torch
from torch import Tensor

from ..rules import Explanation


def owners(nearest_BT: Tensor, why: Explanation) -> Tensor:
    """Name the member whose word a row is. Where the rule believes in laws, the one that it believes most: an answer by
    one expert is that expert's, also where the base would say the same. Else, and where Eq. 2 is believed most: the
    member whose law the composed one is nearest to, the base if it is within ACTIVE of that."""
    law_BTL = why.more.get("law_BTL")
    if law_BTL is None:
        return nearest_BT
    several_BT = (law_BTL.argmax(-1) == law_BTL.shape[-1] - 1) & (why.owner_BT == 0)
    return torch.where(several_BT, nearest_BT, why.owner_BT)
