"""A belief along many tokens at once: Bayes' rule with a share given back is linear in the belief before it is
normalised, so that a chain of updates is a product of small matrices, taken in a few rounds instead of token by token.
Knows beliefs and matrices; no rule.

Shapes: B batch, T time, L laws.
"""

from __future__ import annotations

import torch
from torch import Tensor


def believe_at_once(
    prior_BTL: Tensor | None, said_BTL: Tensor, heard_BT: Tensor, turn_BT: Tensor, belief_BL: Tensor,
    answering_B: Tensor, share: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The belief at every position (log), and whether an answer has begun after the last: as one chain of linear steps,
    each to hear a token, to keep the belief, or to begin anew from the prior, if there is one, where an answer does."""
    answering_BT = answering_B[:, None] | (turn_BT.cumsum(1) > 0)  # after each position
    before_BT = torch.cat([answering_B[:, None], answering_BT[:, :-1]], 1)
    step_BTLL = update_matrices(said_BTL, share)
    same_LL = torch.eye(said_BTL.shape[-1], dtype=said_BTL.dtype, device=said_BTL.device)
    step_BTLL = torch.where((heard_BT & before_BT)[..., None, None], step_BTLL, same_LL)
    if prior_BTL is not None:
        begins_BT = turn_BT | ~before_BT
        step_BTLL = torch.where(begins_BT[..., None, None], prior_BTL.exp()[..., None], step_BTLL)
    return beliefs_along(step_BTLL, belief_BL), answering_BT[:, -1]


def update_matrices(said_BTL: Tensor, share: float) -> Tensor:
    """The matrix of each update, [B, T, L, L]: a belief times what each law said of the token, then `share` of it goes
    back to all laws alike. Only directions count: each may be scaled."""
    laws = said_BTL.shape[-1]
    likely_BTL = (said_BTL - said_BTL.amax(-1, keepdim=True)).exp()
    same_LL = torch.eye(laws, dtype=said_BTL.dtype, device=said_BTL.device)
    return (same_LL * (1 - share) + share / laws) * likely_BTL[..., None, :]


def beliefs_along(step_BTLL: Tensor, belief_BL: Tensor) -> Tensor:
    """The belief (log) after each step, from the one before the first: [B, T, L]. Products are chosen, not
    concatenated: compilers for a GPU fail at some concatenations of concatenations."""
    product_BTLL, reach = step_BTLL, 1
    index_T11 = torch.arange(step_BTLL.shape[1], device=step_BTLL.device)[:, None, None]
    while reach < step_BTLL.shape[1]:  # each product then covers twice as many steps
        longer_BTLL = _times(product_BTLL[:, reach:], product_BTLL[:, :-reach])
        longer_BTLL = longer_BTLL / longer_BTLL.amax((-2, -1), keepdim=True)
        longer_BTLL = torch.nn.functional.pad(longer_BTLL, (0, 0, 0, 0, reach, 0))
        product_BTLL, reach = torch.where(index_T11 < reach, product_BTLL, longer_BTLL), 2 * reach
    weight_BTL = (product_BTLL * belief_BL.exp()[:, None, None]).sum(-1)
    return weight_BTL.log() - weight_BTL.sum(-1, keepdim=True).log()


def _times(left: Tensor, right: Tensor) -> Tensor:
    """The product of small matrices, as sums that a compiler makes one kernel of."""
    return (left[..., :, :, None] * right[..., None, :, :]).sum(-2)
