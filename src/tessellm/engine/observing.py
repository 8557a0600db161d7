"""Show observers a row from which a token was chosen, and why. Computed for observed requests alone.

Observers see the rows of the active members, and shares of all members: one that did not run has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..rules import Explanation, tilt
from ..rules.base import by_nearness
from .requests import Request


def observe(request: Request, rows: Sequence[Tensor], logp_V: Tensor, token: int, members: int) -> dict[str, Any]:
    """Return what the request's observer says of the active members' rows, [1, V] each, and the token chosen from
    them. `members`: how many there are."""
    assert request.observer is not None
    logp_A11V = torch.stack(list(rows))[:, None]
    composed_11V, token_11 = logp_V[None, None], torch.tensor([[token]], device=logp_V.device)
    assert request.components is not None
    active = request.components.members if len(rows) < members else range(members)
    why = _of_all(explain(request, logp_A11V, composed_11V), list(active), members)
    seen = request.observer(logp_A11V, token_11, composed_11V, why) or {}
    return {name: values[0].tolist() for name, values in seen.items()}


def _of_all(why: Explanation, active: Sequence[int], members: int) -> Explanation:
    """Give shares of the active members to their places among all; Eq. 2 of several comes last."""
    if len(active) == members:
        return why
    share_BTM = why.share_BTM.new_zeros(1, 1, members)
    share_BTM[..., active] = why.share_BTM
    more = dict(why.more)
    if "law_BTL" in more:
        posterior_BTL = why.share_BTM.new_zeros(1, 1, members + 1)
        posterior_BTL[..., [*active, members]] = more["law_BTL"]
        more["law_BTL"] = posterior_BTL
    owner_BT = torch.tensor(active, device=why.owner_BT.device)[why.owner_BT]
    return Explanation(share_BTM, owner_BT, why.log_z_BT, more)


def explain(request: Request, logp_A11V: Tensor, composed_11V: Tensor) -> Explanation:
    """Explain a row by the posterior, where there is one: what a component holds is shared among its experts."""
    components = request.components
    assert components is not None
    assert request.log_pi_C is not None
    if len(components.prior) == 1:
        weighed = logp_A11V if components.is_lone else tilt(logp_A11V, components.weights[0])
        return by_nearness(weighed, composed_11V)
    why = by_nearness(logp_A11V, composed_11V)
    pi_C, weights_CK = request.log_pi_C.exp(), torch.tensor(components.weights, device=logp_A11V.device)
    share_CK = weights_CK.clamp_min(0)
    total_C1 = share_CK.sum(-1, keepdim=True)
    part_CA = torch.cat([(total_C1 == 0).to(share_CK), share_CK / total_C1.clamp_min(1e-30)], 1)
    share_A = pi_C @ part_CA
    several = (weights_CK != 0).sum(-1) > 1
    owner_C = torch.where(several, 0, part_CA.argmax(-1))
    own_CA = torch.where(several[:, None], 0.0, part_CA)
    posterior_L = torch.cat([pi_C @ own_CA, (pi_C * several).sum()[None]])
    more = {**why.more, "pi_BTC": pi_C[None, None], "law_BTL": posterior_L[None, None]}
    return Explanation(share_A[None, None], owner_C[pi_C.argmax()][None, None], why.log_z_BT, more)
