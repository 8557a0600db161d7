"""A complete rule: a rule of the table or a user's own, the experts' weights, and who may end the text.

The one place that knows how weights and stopping are put around a rule. What the rule hears of its members are laws:
each expert tilted by its weight and, where a policy decides about stopping, all ways to stop as one event.

Shapes: M members (0 is the base), B batch, T time, V vocabulary, E end tokens of any member.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .equation import tilt, working_dtype
from .mixture import Mixture
from .protocol import Explained, Explanation, Rule, Weights
from .table import RULES, default_termination, resolved
from .termination import READ, Ends, as_event, check_policy, decide, ends_of, release

RuleLike = str | Mapping[str, Any] | Rule  # a name, a mapping with `name` and parameters, or an object


class _Heard(NamedTuple):
    """What a rule hears where stopping is an event of its own, and what it is made of."""

    ends: Ends
    logp_MBTV: Tensor  # end tokens as they are
    seen_MBTV: Tensor  # the event in their place
    event_MBT: Tensor  # its log-probability
    tokens_BT: Tensor


@dataclass(frozen=True)
class ComposedRule:
    """A rule as it runs. Two that are made alike are equal and hash alike, so that caches can tell whether they were
    made under this rule, and engines share what was compiled for it.

    `weights` has a number per expert, None for all 1; `stops` the end tokens of every member, the base first."""

    rule: Rule
    weights: tuple[float, ...] | Tensor | None = None
    stops: tuple[tuple[int, ...], ...] = ()
    policy: str = "rule"
    _inner: Rule = field(init=False, repr=False, compare=False)  # the rule, with the weights if it weighs by itself
    _tilt: Weights | None = field(init=False, repr=False, compare=False)  # else the weights, if not all are 1
    _ends: dict[str, Ends] = field(default_factory=dict, init=False, repr=False, compare=False)  # one copy per device

    def __post_init__(self) -> None:
        check_policy(self.policy)
        if self.policy != "rule" and not any(self.stops):
            raise ValueError(f"the policy {self.policy!r} needs at least one end token; none of the members has one")
        if self.policy != "rule" and isinstance(self.rule, Mixture):
            raise ValueError("the rule 'mixture' ends where its components end; termination is for the rule product")
        numbers = self.weights_but_ones
        own = None if numbers is None or self.stopping_is_event else self.rule.weighted(numbers)
        inner = self.rule if own is None else own
        object.__setattr__(self, "_inner", inner)
        object.__setattr__(self, "_tilt", numbers if own is None else None)

    @classmethod
    def make(
        cls,
        rule: RuleLike,
        weights: Weights | None = None,
        end_ids: Sequence[Sequence[int]] = (),
        termination: str | None = None,
    ) -> ComposedRule:
        """Complete a rule. Weights that it came with go before `weights`; by default it stops as suits it. Where no
        member has an end token, end tokens are left to the rule."""
        plain, own = _taken_apart(rule)
        policy = default_termination(plain.name) if termination is None else termination
        check_policy(policy)
        stops = tuple(tuple(ids) for ids in end_ids)
        return cls(plain, _numbers(weights if own is None else own), stops, policy if any(stops) else "rule")

    def with_(
        self, rule: RuleLike | None = None, weights: Weights | None = None, termination: str | None = None
    ) -> ComposedRule:
        """The same over the same members, but for what is given. A new rule stops as suits it."""
        if rule is None:
            rule, termination = self.rule, self.policy if termination is None else termination
        return self.make(rule, self.weights if weights is None else weights, self.stops, termination)

    @property
    def name(self) -> str:
        return self.rule.name

    @property
    def window(self) -> int:
        return self.rule.window

    @property
    def _end_ids(self) -> frozenset[int]:
        return frozenset(token for ids in self.stops for token in ids)

    @property
    def is_product(self) -> bool:
        return self.rule.is_product and not self.stopping_is_event

    @property
    def tells(self) -> frozenset[str]:
        return self.rule.tells

    @property
    def stopping_is_event(self) -> bool:
        """Whether a policy decides about stopping, rather than the rule."""
        return self.policy != "rule"

    @property
    def weights_but_ones(self) -> Weights | None:
        """The weights, None where they change nothing."""
        if self.weights is None or isinstance(self.weights, Tensor):
            return self.weights
        return None if all(weight == 1 for weight in self.weights) else self.weights

    @property
    def hears_members_as_they_are(self) -> bool:
        return not self.stopping_is_event and self.weights_but_ones is None

    @property
    def routed(self) -> Mixture | None:
        """The rule itself, with the weights in it, where it takes its prior from a router; else None."""
        return self._inner if isinstance(self._inner, Mixture) else None

    def check_fit(self, experts: int, vocab_size: int) -> None:
        """Raise ValueError where the rule's parameters are those of other members."""
        if (check := getattr(self.rule, "check_fit", None)) is not None:
            check(experts, vocab_size)

    def describe(self) -> dict[str, Any]:
        """Its name and parameters, as a config holds them; weights and termination stand elsewhere there."""
        return self.rule.describe()

    def weighted(self, weights: Weights | None) -> ComposedRule:
        return ComposedRule(self.rule, _numbers(weights), self.stops, self.policy)

    def idle_budget(self, kl_BTK: Tensor, epsilon_BTK: Tensor, why: Explanation) -> tuple[Tensor, Tensor]:
        return self.rule.idle_budget(kl_BTK, epsilon_BTK, why)

    def __call__(self, logp_MBTV: Tensor, tokens_BT: Tensor, mask_BT: Tensor, state: Any) -> tuple[Tensor, Any]:
        if self.stopping_is_event and READ.get(self.policy, frozenset()) & self.rule.tells:
            return self.explain(logp_MBTV, tokens_BT, mask_BT, state)[:2]
        logp_MBTV = self._tilted(logp_MBTV)
        if not self.stopping_is_event:
            return self._inner(logp_MBTV, tokens_BT, mask_BT, state)
        heard = self._hear_event(logp_MBTV, tokens_BT)
        logp_BTV, state = self._inner(heard.seen_MBTV, heard.tokens_BT, mask_BT, state)
        return self._stop(heard, logp_BTV, {}), state

    def explain(self, logp_MBTV: Tensor, tokens_BT: Tensor, mask_BT: Tensor, state: Any) -> Explained:
        """Run it, and say why the rule said what it did of what it heard."""
        logp_MBTV = self._tilted(logp_MBTV)
        if not self.stopping_is_event:
            return self._inner.explain(logp_MBTV, tokens_BT, mask_BT, state)
        heard = self._hear_event(logp_MBTV, tokens_BT)
        logp_BTV, state, why = self._inner.explain(heard.seen_MBTV, heard.tokens_BT, mask_BT, state)
        return self._stop(heard, logp_BTV, why.more), state, why

    def _hear_event(self, logp_MBTV: Tensor, tokens_BT: Tensor) -> _Heard:
        """All ways to stop as one event, in the members' laws and in the text."""
        logp_MBTV, ends = logp_MBTV.to(working_dtype(logp_MBTV)), self.ends_on(logp_MBTV.device)
        is_end_BT = (tokens_BT[..., None] == ends.token_E).any(-1)
        heard_BT = torch.where(is_end_BT, ends.token_E[ends.event], tokens_BT)
        return _Heard(ends, logp_MBTV, *as_event(logp_MBTV, ends), heard_BT)

    def _stop(self, heard: _Heard, logp_BTV: Tensor, told: Mapping[str, Tensor]) -> Tensor:
        """The rule's answer, with the probability of stopping that the policy decides."""
        spoken_BT = logp_BTV.index_select(-1, heard.ends.token_E[:1])[..., 0]
        log_h_BT, share_MBT = decide(self.policy, heard.event_MBT, spoken_BT, told)
        return release(heard.logp_MBTV, heard.ends, logp_BTV, log_h_BT, share_MBT)

    def members_heard(self, logp_MBTV: Tensor) -> Tensor:
        """The members' laws, as the rule hears them."""
        if (weights := self.weights_but_ones) is not None:
            logp_MBTV = tilt(logp_MBTV, weights)
        return as_event(logp_MBTV, self.ends_on(logp_MBTV.device))[0] if self.stopping_is_event else logp_MBTV

    def itself_heard(self, logp_BTV: Tensor) -> Tensor:
        """The composed law, as the rule would hear it: any end token of any member is its own."""
        if not self.stopping_is_event:
            return logp_BTV
        ends = self.ends_on(logp_BTV.device)
        return as_event(logp_BTV[None], Ends(ends.token_E, torch.ones_like(ends.own_ME[:1])))[0][0]

    def stop_event(self, heard: Tensor) -> Tensor | None:
        """log h of each law that is heard, where stopping is an event of its own."""
        if not self.stopping_is_event:
            return None
        return heard.index_select(-1, self.ends_on(heard.device).token_E[:1])[..., 0]

    def ends_on(self, device: torch.device) -> Ends:
        """The end tokens on that device, copied there once."""
        place = str(device)
        if place not in self._ends:
            self._ends[place] = ends_of(self.stops, device)
        return self._ends[place]

    def _tilted(self, logp_MBTV: Tensor) -> Tensor:
        return logp_MBTV if self._tilt is None else tilt(logp_MBTV, self._tilt)


def make_rule(name: str, weights: Sequence[float] | None = None, **parameters: Any) -> ComposedRule:
    """A rule of the table, by name, with its parameters and the experts' weights."""
    return ComposedRule.make({"name": name, **parameters}, weights)


def _taken_apart(rule: RuleLike) -> tuple[Rule, Weights | None]:
    """A rule object without weights, and the weights that it came with: those are the experts'."""
    if isinstance(rule, str):
        rule = {"name": rule}
    if isinstance(rule, Mapping):
        parameters = dict(rule)
        name, weights = resolved(parameters.pop("name")), parameters.pop("weights", None)
        if name not in RULES:
            raise ValueError(f"unknown rule {name!r}; known: {', '.join(RULES)}")
        return RULES[name].make(**parameters), weights
    if isinstance(rule, ComposedRule):
        return rule.rule, rule.weights
    if not isinstance(rule, Rule):
        raise TypeError(
            f"expected a rule's name, a mapping with its name and parameters, or a rule object; got {rule!r}. Make "
            "its class a subclass of tessellm.rules.BaseRule"
        )
    return (rule.weighted(None) if rule.weights is not None else None) or rule, rule.weights


def _numbers(weights: Weights | None) -> tuple[float, ...] | Tensor | None:
    if weights is None or isinstance(weights, Tensor):
        return weights
    return tuple(float(weight) for weight in weights)
