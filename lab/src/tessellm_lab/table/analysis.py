"""Why a composition is right or wrong: what its members say along right texts, whose turn it is, where it first errs.

M members (0 the base)   B texts   T tokens   V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tessellm.rules import make_rule, product, product_scores

from .gold import Gold, misses
from .texts import CODE, MATH

PIECES = {"steps": MATH, "body": CODE}
ACTIVE = 0.1  # nats: an expert that diverges by more says something of its own


def default_rule(logp_MBTV: Tensor, gold: Gold) -> Tensor:
    made: tuple[Tensor, Any] = make_rule("evidence")(
        logp_MBTV, gold.tokens_BT, torch.ones_like(gold.tokens_BT, dtype=torch.bool), None
    )
    return made[0]


def oracle(logp_MBTV: Tensor, gold: Gold) -> Tensor:
    """Whose token is next speaks."""
    next_BT = gold.owner_BT.roll(-1, 1)
    return logp_MBTV.gather(0, next_BT[None, ..., None].expand(1, *logp_MBTV.shape[1:]))[0]


RULES: dict[str, Callable[[Tensor, Gold], Tensor]] = {
    "evidence": default_rule,
    "product": lambda logp_MBTV, gold: product(logp_MBTV),
    "oracle": oracle,
}


def analyse(models: Sequence[Any], gold: Gold) -> dict[str, Any]:
    """Shares of texts that each rule would write exactly, the piece in which it first errs, and the members' laws: how
    far the experts are from the base where they should be idle (Def. 4: nowhere), and |log Z| of Eq. 2 (Thm 2: 0)."""
    found: dict[str, Any] = {"exact": {}, "first error": {}}
    for name, rule in RULES.items():
        wrong_BT, _ = misses(models, gold, rule)
        found["exact"][name] = 1 - wrong_BT.any(1).float().mean().item()
        found["first error"][name] = first_errors(wrong_BT, gold)
    return found | laws(models, gold)


def first_errors(wrong_BT: Tensor, gold: Gold) -> dict[str, int]:
    """In how many texts the first wrong token is one of the steps, or of the body."""
    bad_B, at_B = wrong_BT.any(1), wrong_BT.int().argmax(1)
    owner_B = gold.owner_BT.gather(1, at_B[:, None])[:, 0][bad_B]
    return {piece: int((owner_B == owner).sum()) for piece, owner in PIECES.items()}


@torch.no_grad()
def laws(models: Sequence[Any], gold: Gold, rows: int = 64) -> dict[str, Any]:
    some = Gold(*(each[:rows] for each in gold))
    logp_MBTV = torch.stack([model(some.tokens_BT).logits.float().log_softmax(-1) for model in models])[:, :, :-1]
    written_BT, owner_BT = some.written_BT[:, 1:], some.owner_BT[:, 1:]
    kl_KBT = (logp_MBTV[1:].exp() * (logp_MBTV[1:] - logp_MBTV[:1])).sum(-1)
    idle = {
        f"expert {number}": kl_BT[written_BT & (owner_BT != number)].mean().item()
        for number, kl_BT in enumerate(kl_KBT, 1)
        if (written_BT & (owner_BT != number)).any()
    }
    log_z_BT = product_scores(logp_MBTV).logsumexp(-1)[written_BT]
    overlap_BT = (kl_KBT > ACTIVE).all(0)[written_BT]
    return {
        "mean KL from the base where idle": idle,
        "share of tokens at which both experts diverge": overlap_BT.float().mean().item(),
        "mean |log Z|": log_z_BT.abs().mean().item(),
        "largest |log Z|": log_z_BT.abs().max().item(),
    }
