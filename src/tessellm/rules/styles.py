"""Styles: experts that concern every prompt, such as answers in capitals. Pure functions; knows no rule.

A style has no law of its own. Every law ℓ that a mixture weighs is said in the styles s: Eq. 2 over ℓ and them,

    log p̃_ℓ = log p_ℓ + Σ_s (log p_s − log p_b) − log Z_ℓ

so the base in one style is that style's expert, and evidence is what the styled laws gave to a styled text. Which
experts are styles is declared: log-probabilities cannot tell, since narrow experts act on every prompt too.

Shapes: M members (0 is the base), S styles, O = M−S others, B batch, T time, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .equation import product
from .protocol import Explanation
from .resting import believed_owner


def checked_styles(styles: Sequence[int]) -> tuple[int, ...]:
    """The numbers of the experts that are styles, in order."""
    if any(not isinstance(style, int) or isinstance(style, bool) or style < 1 for style in styles):
        raise ValueError(f"styles are numbers of experts, 1 for the first; got {styles!r}")
    if len(set(styles)) < len(styles):
        raise ValueError(f"styles are numbers of experts, each once; got {styles!r}")
    return tuple(sorted(styles))


def check_some_speak(styles: Sequence[int], experts: int) -> None:
    """Refuse styles of other members, and styles alone."""
    if any(style > experts for style in styles):
        raise ValueError(f"expected styles among {experts} experts; got {styles!r}")
    if len(styles) == experts:
        raise ValueError("expected an expert that is no style; styles alone are composed by the rule product")


def apart(logp_MBTV: Tensor, styles: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The base with the experts that are no styles, [O, B, T, V], and the styles, [S, B, T, V]."""
    others = [member for member in range(len(logp_MBTV)) if member not in styles]
    own, style = (torch.stack([logp_MBTV[member] for member in members]) for members in (others, styles))
    return own, style


def in_styles(logp_OBTV: Tensor, style_SBTV: Tensor) -> Tensor:
    """The law of the base and of every other expert, said in the styles: [O, B, T, V]."""
    base_1BTV, *laws = logp_OBTV.split(1)
    styled = [product(torch.cat([base_1BTV, style_SBTV]))]
    return torch.stack([*styled, *(product(torch.cat([base_1BTV, law, style_SBTV])) for law in laws)])


def with_styles(why: Explanation, styles: Sequence[int], plain_BTV: Tensor, said_BTV: Tensor) -> Explanation:
    """Give the styles their share of what is said: the probability that they moved, the total variation between what
    would be said without them and what is. Several have equal parts of it. As laws they are believed nothing; the base
    in its styles is the first of them."""
    moved_BT1 = (said_BTV.exp() - plain_BTV.exp()).abs().sum(-1, keepdim=True) / 2
    own_BTM, law_BTL, score_BTM = (
        _widened(each, styles)
        for each in (why.belief_BTM, why.more["law_BTL"], torch.nn.functional.pad(why.more["score_BTK"], (1, 0)))
    )
    style_BTM = _widened(torch.zeros_like(why.belief_BTM), styles, 1 / len(styles))
    belief_BTM = own_BTM * (1 - moved_BT1) + style_BTM * moved_BT1
    more = {**why.more, "law_BTL": law_BTL, "score_BTK": score_BTM[..., 1:]}
    others = [member for member in range(1, law_BTL.shape[-1] - 1) if member not in styles]
    owner_BT = believed_owner(law_BTL, styles[0], 0 if len(others) > 1 else others[0])
    return Explanation(belief_BTM, owner_BT, why.log_z_BT, more)


def _widened(own_BTN: Tensor, styles: Sequence[int], number: float = 0.0) -> Tensor:
    """Numbers of all others, with `number` where a style stands among them."""
    columns = list(own_BTN.unbind(-1))
    for style in styles:
        columns.insert(style, torch.full_like(own_BTN[..., 0], number))
    return torch.stack(columns, -1)
