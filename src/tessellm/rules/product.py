"""The rule `product`: Eq. 2 as a rule object. The equation itself is in equation.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .base import BaseRule, Explained, Weights, by_nearness
from .equation import product, tilt


@dataclass(frozen=True)
class Product(BaseRule):
    """The paper's rule, Eq. 2, as a rule object."""

    weights: tuple[float, ...] | Tensor | None = None
    name = "product"

    def __call__(self, logp_MBTV: Tensor, tokens_BT: Tensor, mask_BT: Tensor, state: Any) -> tuple[Tensor, Any]:
        if isinstance(self.weights, Tensor):  # gradients follow them
            return product(logp_MBTV, self.weights), None
        weights = self.weights or (1.0,) * (len(logp_MBTV) - 1)
        speaking = [expert for expert, weight in enumerate(weights) if weight != 0]
        if len(speaking) == 1 and weights[speaking[0]] == 1:  # that expert, to the last bit
            return logp_MBTV[1 + speaking[0]], None
        return product(logp_MBTV, weights), None

    def explain(self, logp_MBTV: Tensor, tokens_BT: Tensor, mask_BT: Tensor, state: Any) -> Explained:
        logp_BTV, state = self(logp_MBTV, tokens_BT, mask_BT, state)
        tilted_MBTV = logp_MBTV if self.weights is None else tilt(logp_MBTV, self.weights)
        return logp_BTV, state, by_nearness(tilted_MBTV, logp_BTV)

    def weighted(self, weights: Weights | None) -> Product:
        """Eq. 2 over tilted experts is Eq. 2 with weights, since their normalisers cancel; this way is exact."""
        return Product(weights if weights is None or isinstance(weights, Tensor) else tuple(weights))
