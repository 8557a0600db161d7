"""Show observers a row from which a token was chosen, and why. Computed for observed requests alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..rules import Explanation, tilt
from ..rules.base import by_nearness
from .requests import Request


def observe(request: Request, rows: Sequence[Tensor], logp_V: Tensor, token: int) -> dict[str, Any]:
    """Return what the request's observer says of the members' rows, [1, V] each, and the token chosen from them."""
    assert request.observer is not None
    logp_M11V = torch.stack(list(rows))[:, None]
    composed_11V, token_11 = logp_V[None, None], torch.tensor([[token]], device=logp_V.device)
    seen = request.observer(logp_M11V, token_11, composed_11V, explain(request, logp_M11V, composed_11V)) or {}
    return {name: values[0].tolist() for name, values in seen.items()}


def explain(request: Request, logp_M11V: Tensor, composed_11V: Tensor) -> Explanation:
    """Explain a row by the posterior, where there is one: what a component holds is shared among its experts."""
    components = request.components
    assert components is not None
    assert request.log_pi_C is not None
    if len(components.prior) == 1:
        heard = logp_M11V if components.is_lone else tilt(logp_M11V, components.weights[0])
        return by_nearness(heard, composed_11V)
    why = by_nearness(logp_M11V, composed_11V)
    pi_C, weights_CK = request.log_pi_C.exp(), torch.tensor(components.weights, device=logp_M11V.device)
    share_CK = weights_CK.clamp_min(0)
    total_C1 = share_CK.sum(-1, keepdim=True)
    belief_CM = torch.cat([(total_C1 == 0).to(share_CK), share_CK / total_C1.clamp_min(1e-30)], 1)
    belief_M = pi_C @ belief_CM
    several = (weights_CK != 0).sum(-1) > 1
    owner_C = torch.where(several, 0, belief_CM.argmax(-1))
    own_CM = torch.where(several[:, None], 0.0, belief_CM)
    posterior_L = torch.cat([pi_C @ own_CM, (pi_C * several).sum()[None]])
    more = {**why.more, "pi_BTC": pi_C[None, None], "law_BTL": posterior_L[None, None]}
    return Explanation(belief_M[None, None], owner_C[pi_C.argmax()][None, None], why.log_z_BT, more)
