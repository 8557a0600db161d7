"""What most rules share: defaults for all of the protocol but a name and `__call__`. Knows no rule in particular.

Shapes: M members (0 is the base), K experts, B batch, T time, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from .equation import LOG_FLOOR, product_scores, working_dtype
from .protocol import Explained, Explanation, Rule, Weights


class BaseRule:
    """A rule that says no more of itself than its name and what it answers. Subclass it and write `__call__`; a frozen
    dataclass whose fields are the rule's parameters can be compared, compiled once, and saved."""

    name: str
    window: int = 0
    weights: Weights | None = None
    is_product = False
    tells: frozenset[str] = frozenset()

    def __call__(self, logp_MBTV: Tensor, tokens_BT: Tensor, mask_BT: Tensor, state: Any) -> tuple[Tensor, Any]:
        raise NotImplementedError(f"the rule {self.name!r} needs a method __call__")

    def explain(self, logp_MBTV: Tensor, tokens_BT: Tensor, mask_BT: Tensor, state: Any) -> Explained:
        """Run the rule, and judge by what it says."""
        logp_BTV, state = self(logp_MBTV, tokens_BT, mask_BT, state)
        return logp_BTV, state, by_nearness(logp_MBTV, logp_BTV)

    def weighted(self, weights: Weights | None) -> Rule | None:
        return None

    def describe(self) -> dict[str, Any]:
        entry: dict[str, Any] = {"name": self.name}
        for field in fields(self) if is_dataclass(self) else ():  # type: ignore[var-annotated]
            value = getattr(self, field.name)
            if field.init and field.name not in ("name", "weights") and value != field.default:
                entry[field.name] = value
        return entry

    def idle_budget(self, kl_BTK: Tensor, epsilon_BTK: Tensor, why: Explanation) -> tuple[Tensor, Tensor]:
        """Nothing is known: the budget is infinite."""
        return kl_BTK.argmax(-1) + 1, torch.full_like(kl_BTK[..., 0], torch.inf)


@dataclass(frozen=True)
class FunctionRule(BaseRule):
    """A rule without state: a function of the members' log-probabilities, [M, B, T, V] to [B, T, V]."""

    name: str
    function: Callable[[Tensor], Tensor]

    def __call__(self, logp_MBTV: Tensor, tokens_BT: Tensor, mask_BT: Tensor, state: Any) -> tuple[Tensor, Any]:
        return self.function(logp_MBTV), None

    def describe(self) -> dict[str, Any]:
        return {"name": self.name}


def first_member(logp_MBTV: Tensor) -> Tensor:
    """Let the first member speak: what is left to combine where there is one member."""
    return logp_MBTV[0]


def by_nearness(logp_MBTV: Tensor, logp_BTV: Tensor) -> Explanation:
    """Explain any rule by its answer: a member's share falls with KL(p̂ ‖ p_m), whose entropy of p̂ cancels."""
    safe_MBTV = logp_MBTV.to(working_dtype(logp_BTV)).clamp_min(LOG_FLOOR)
    near_BTM = torch.einsum("btv,mbtv->btm", logp_BTV.to(safe_MBTV.dtype).exp(), safe_MBTV)
    alone = len(logp_MBTV) == 1
    log_z_BT = torch.zeros_like(near_BTM[..., 0]) if alone else product_scores(logp_MBTV).logsumexp(-1)
    return Explanation(near_BTM.softmax(-1), near_BTM.argmax(-1), log_z_BT, {})


def loudest_alone(loudness_BTK: Tensor, epsilon_BTK: Tensor) -> tuple[Tensor, Tensor]:
    """The loudest expert is ideal; the others bring in their ε, all of it (the approximate theorem for Eq. 2)."""
    expert_K = torch.arange(loudness_BTK.shape[-1], device=loudness_BTK.device)
    loudest_BT1 = loudness_BTK.argmax(-1, keepdim=True)
    return loudest_BT1[..., 0] + 1, torch.where(expert_K == loudest_BT1, 0.0, epsilon_BTK).sum(-1)
