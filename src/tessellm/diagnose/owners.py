"""Which member each token is due to: what traces colour and reports count."""

from __future__ import annotations

import torch
from torch import Tensor

from ..rules import Explanation


def owners(nearest_BT: Tensor, why: Explanation) -> Tensor:
    """Return the owner of each row. Where the rule has a posterior, it is the component with most of it: an answer by
    one expert is that expert's, also where the base would write the same. Else, and where that is Eq. 2, it is the
    nearest member, the base if it is within ACTIVE of that."""
    posterior_BTL = why.more.get("law_BTL")
    if posterior_BTL is None:
        return nearest_BT
    several_BT = (posterior_BTL.argmax(-1) == posterior_BTL.shape[-1] - 1) & (why.owner_BT == 0)
    return torch.where(several_BT, nearest_BT, why.owner_BT)
