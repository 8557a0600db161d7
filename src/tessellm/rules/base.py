"""What a rule is: it combines the members' next-token log-probabilities into one normalised distribution.

A rule knows nothing of models, tokenizers or files. Member 0 is the base; the others are experts.

    M members   K experts   B batch   T time   V vocabulary

    rule(logp_MBTV, tokens_BT, mask_BT, state) -> (logp_BTV, state)
    rule.explain(the same)                     -> (logp_BTV, state, Explanation)

tokens[t] is the token fed at t, the one that row t−1 predicted; padding (mask False) is never observed. State is None
at the start of a sequence, else a NamedTuple of tensors with the batch first.

A rule of your own is a `FunctionRule` or a subclass of `BaseRule`, which needs a name and `__call__`. It runs in the
reference model; engines run `mixture` and `product`. Weights are put around it by complete.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .equation import LOG_FLOOR, product_scores, working_dtype

Weights = Sequence[float] | Tensor  # one per expert; a tensor where gradients are wanted


class Explanation(NamedTuple):
    """Why each row came out as it did; every tensor begins with [B, T]."""

    share_BTM: Tensor  # the share of each member (or component) in what is written; sums to 1
    owner_BT: Tensor  # the member that decides; 0 where several do, or the base
    log_z_BT: Tensor  # log Z of Eq. 2 over the experts, nats
    more: Mapping[str, Tensor]  # what this rule alone can tell, by name; of traces it becomes a column

    def map(self, function: Callable[[Tensor], Tensor]) -> Explanation:
        """Apply a function, such as a choice of rows, to every tensor."""
        share, owner, log_z = (function(each) for each in self[:3])
        return Explanation(share, owner, log_z, {name: function(each) for name, each in self.more.items()})


Explained = tuple[Tensor, Any, Explanation]


class BaseRule:
    """Subclass it and write `__call__`; a frozen dataclass whose fields are the rule's parameters can be compared, and
    saved where an entry point of the group `tessellm.rules` names it."""

    name: str
    stateful: bool = False
    weights: Weights | None = None  # that it was made with

    def __call__(self, logp_MBTV: Tensor, tokens_BT: Tensor, mask_BT: Tensor, state: Any) -> tuple[Tensor, Any]:
        raise NotImplementedError(f"the rule {self.name!r} needs a method __call__")

    def explain(self, logp_MBTV: Tensor, tokens_BT: Tensor, mask_BT: Tensor, state: Any) -> Explained:
        """Do what a call does, to the last bit, and say why; by default judged by the answer."""
        logp_BTV, state = self(logp_MBTV, tokens_BT, mask_BT, state)
        return logp_BTV, state, by_nearness(logp_MBTV, logp_BTV)

    def weighted(self, weights: Weights | None) -> BaseRule | None:
        """Return the rule with weights in it, if it has a way of its own to weigh experts; None: tilt its experts."""
        return None

    def with_ends(self, end_ids: Sequence[Sequence[int]]) -> BaseRule:
        """Return the rule for members with these end tokens, if it decides about stopping by itself."""
        return self

    def check_fit(self, experts: int) -> None:
        """Raise ValueError where the parameters are not those of so many experts."""

    def describe(self) -> dict[str, Any]:
        """Return its name and those of its parameters that are not the default, as a config holds them."""
        entry: dict[str, Any] = {"name": self.name}
        for field in fields(self) if is_dataclass(self) else ():  # type: ignore[var-annotated]
            value = getattr(self, field.name)
            if field.init and field.name not in ("name", "weights") and value != field.default:
                entry[field.name] = value
        return entry


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
    """Return the first member's: what is left to combine where there is one member."""
    return logp_MBTV[0]


def by_nearness(logp_MBTV: Tensor, logp_BTV: Tensor) -> Explanation:
    """Explain any rule by its answer: a member's share falls with KL(p̂ ‖ p_m), whose entropy of p̂ cancels."""
    safe_MBTV = logp_MBTV.to(working_dtype(logp_BTV)).clamp_min(LOG_FLOOR)
    near_BTM = torch.einsum("btv,mbtv->btm", logp_BTV.to(safe_MBTV.dtype).exp(), safe_MBTV)
    alone = len(logp_MBTV) == 1
    log_z_BT = torch.zeros_like(near_BTM[..., 0]) if alone else product_scores(logp_MBTV).logsumexp(-1)
    return Explanation(near_BTM.softmax(-1), near_BTM.argmax(-1), log_z_BT, {})
