"""A complete rule: a rule of the table or a user's own, with the experts' weights put around it.

Shapes: M members (0 is the base), B batch, T time, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .base import BaseRule, Explained, Weights
from .equation import tilt
from .mixture import Mixture
from .table import find_rule, resolved, rule_names

RuleLike = str | Mapping[str, Any] | BaseRule  # a name, a mapping with `name` and parameters, or an object


@dataclass(frozen=True)
class ComposedRule(BaseRule):
    """A rule as it runs. Two that are made alike are equal and hash alike, so that caches can tell whether they were
    made under this rule.

    `weights` has a number per expert, None for all 1; `end_ids` the end tokens of every member, the base first."""

    rule: BaseRule
    weights: tuple[float, ...] | Tensor | None = None
    end_ids: tuple[tuple[int, ...], ...] = ()
    name: str = field(init=False, repr=False, compare=False)
    stateful: bool = field(init=False, repr=False, compare=False)
    _inner: BaseRule = field(init=False, repr=False, compare=False)  # with the weights, if it weighs by itself
    _tilt: Weights | None = field(init=False, repr=False, compare=False)  # else the weights, if not all are 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.rule.name)
        object.__setattr__(self, "stateful", self.rule.stateful)
        numbers = self.weights_but_ones
        own = None if numbers is None else self.rule.weighted(numbers)
        object.__setattr__(self, "_inner", (own or self.rule).with_ends(self.end_ids))
        object.__setattr__(self, "_tilt", numbers if own is None else None)

    @classmethod
    def make(
        cls, rule: RuleLike, weights: Weights | None = None, end_ids: Sequence[Sequence[int]] = ()
    ) -> ComposedRule:
        """Complete a rule. Weights that it came with go before `weights`."""
        plain, own = _taken_apart(rule)
        return cls(plain, _numbers(weights if own is None else own), tuple(tuple(ids) for ids in end_ids))

    def with_(self, rule: RuleLike | None = None, weights: Weights | None = None) -> ComposedRule:
        """Return the same over the same members, but for what is given."""
        weights = self.weights if weights is None else weights
        return self.make(self.rule if rule is None else rule, weights, self.end_ids)

    @property
    def weights_but_ones(self) -> Weights | None:
        """The weights, None where they change nothing."""
        if self.weights is None or isinstance(self.weights, Tensor):
            return self.weights
        return None if all(weight == 1 for weight in self.weights) else self.weights

    @property
    def routed(self) -> Mixture | None:
        """The rule itself, with the weights in it, where it takes its prior from a router; else None."""
        return self._inner if isinstance(self._inner, Mixture) else None

    def check_fit(self, experts: int) -> None:
        self.rule.check_fit(experts)

    def describe(self) -> dict[str, Any]:
        """Return its name and parameters, as a config holds them; weights stand elsewhere there."""
        return self.rule.describe()

    def __call__(self, logp_MBTV: Tensor, tokens_BT: Tensor, mask_BT: Tensor, state: Any) -> tuple[Tensor, Any]:
        return self._inner(self._tilted(logp_MBTV), tokens_BT, mask_BT, state)

    def explain(self, logp_MBTV: Tensor, tokens_BT: Tensor, mask_BT: Tensor, state: Any) -> Explained:
        return self._inner.explain(self._tilted(logp_MBTV), tokens_BT, mask_BT, state)

    def weighted_members(self, logp_MBTV: Tensor) -> Tensor:
        """Return the members' log-probabilities, every expert tilted by its weight."""
        return logp_MBTV if self.weights_but_ones is None else tilt(logp_MBTV, self.weights_but_ones)

    def _tilted(self, logp_MBTV: Tensor) -> Tensor:
        return logp_MBTV if self._tilt is None else tilt(logp_MBTV, self._tilt)


def make_rule(name: str, weights: Sequence[float] | None = None, **parameters: Any) -> ComposedRule:
    """Make a rule of the table, by name, with its parameters and the experts' weights."""
    return ComposedRule.make({"name": name, **parameters}, weights)


def _taken_apart(rule: RuleLike) -> tuple[BaseRule, Weights | None]:
    """Return a rule object without weights, and the weights that it came with: those are the experts'."""
    if isinstance(rule, str):
        rule = {"name": rule}
    if isinstance(rule, Mapping):
        parameters = dict(rule)
        name, weights = resolved(parameters.pop("name")), parameters.pop("weights", None)
        entry = find_rule(name)
        if entry is None:
            raise ValueError(f"unknown rule {name!r}; known: {', '.join(rule_names())}")
        return entry.make(**parameters), weights
    if isinstance(rule, ComposedRule):
        return rule.rule, rule.weights
    if not isinstance(rule, BaseRule):
        raise TypeError(
            f"expected a rule's name, a mapping with its name and parameters, or a rule object; got {rule!r}. Make "
            "its class a subclass of tessellm.rules.BaseRule"
        )
    return (rule.weighted(None) if rule.weights is not None else None) or rule, rule.weights


def _numbers(weights: Weights | None) -> tuple[float, ...] | Tensor | None:
    if weights is None or isinstance(weights, Tensor):
        return weights
    return tuple(float(weight) for weight in weights)
