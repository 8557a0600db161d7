"""Components: what one request mixes. Which members are active, W over them, and the prior π⁰.

A request's `experts` are one row of W, and so is the rule `product`. The rule `mixture` has several rows, of the
members that the router made active. Members outside the active set have no rows and do not run.

Shapes: A active members, C components, B sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import EngineError
from ..model import ComposedForCausalLM
from ..model.variants import changed_weights, is_alone
from ..routing.route import Route
from ..rules.components import component_logp, mix_components, update

Row = tuple[float, ...]


@dataclass(frozen=True)
class Components:
    """Active members, in the composition's order; W over the experts among them; the prior of each row."""

    members: tuple[int, ...]
    weights: tuple[Row, ...]  # one entry per active member but the base, which comes first where there are several
    prior: Row
    switch_prob: float = 0.0

    @property
    def is_lone(self) -> bool:
        """Whether one member answers alone, to the last bit."""
        return len(self.members) == 1

    @property
    def answering(self) -> tuple[int, ...]:
        """List the members that some component needs; others are active for an observer alone."""
        experts = [member for member in self.members if member]
        needed = {member for row in self.weights for member, weight in zip(experts, row, strict=True) if weight}
        base = any([weight for weight in row if weight] != [1.0] for row in self.weights)
        return tuple(sorted(needed | ({0} if base else set())))

    def logp(self, logp_ABV: Tensor) -> Tensor:
        """Return log p_c of every component: [C, B, V]."""
        if self.is_lone:
            return logp_ABV
        return component_logp(logp_ABV, torch.tensor(self.weights))

    def mix(self, logp_CBV: Tensor, log_pi_BC: Tensor) -> Tensor:
        """Return log p̂: [B, V]."""
        return logp_CBV[0] if len(logp_CBV) == 1 else mix_components(logp_CBV, log_pi_BC)

    def update(self, log_pi_BC: Tensor, loglik_BC: Tensor) -> Tensor:
        """Return log π after a token that the components gave these log-likelihoods."""
        if len(self.prior) == 1:
            return log_pi_BC
        prior_BC = torch.tensor(self.prior, dtype=log_pi_BC.dtype, device=log_pi_BC.device).expand_as(log_pi_BC)
        return update(log_pi_BC, loglik_BC, prior_BC, self.switch_prob)

    def log_prior(self, device: torch.device) -> Tensor:
        return torch.tensor(self.prior, device=device).log()

    def with_members(self, members: Sequence[int]) -> Components:
        """Return the same components with more members active, which no row mentions."""
        experts = [member for member in self.members if member]
        rows = [dict(zip(experts, row, strict=True)) for row in self.weights]
        wanted = sorted({0, *members, *self.members})
        weights = tuple(tuple(row.get(member, 0.0) for member in wanted[1:]) for row in rows)
        return Components(tuple(wanted), weights, self.prior, self.switch_prob)


def components_of(rows: Sequence[Row], prior: Sequence[float], switch_prob: float = 0.0) -> Components:
    """Make components of rows over all experts: those without a prior are left out, and members that none needs."""
    kept = [(tuple(row), share) for row, share in zip(rows, prior, strict=True) if share > 0]
    total = sum(share for _, share in kept)
    experts = sorted({number for row, _ in kept for number, weight in enumerate(row, 1) if weight})
    if len(kept) == 1 and sorted(weight for weight in kept[0][0] if weight) in ([], [1.0]):
        return Components(tuple(experts) or (0,), ((1.0,) if experts else (),), (1.0,))
    weights = tuple(tuple(row[number - 1] for number in experts) for row, _ in kept)
    return Components((0, *experts), weights, tuple(share / total for _, share in kept), switch_prob)


class ComponentTable:
    """What requests of one composition can mix."""

    def __init__(self, model: ComposedForCausalLM):
        self.model, self.rule = model, model.rule
        self.names = list(model.members)
        self.experts = len(self.names) - 1
        inner, weights = self.rule.rule, self.rule.weights_but_ones
        self.inner: Any = inner if weights is None else inner.weighted(weights) or inner
        self.routed = not is_alone(model) and self.rule.name == "mixture"
        self.own = None if self.routed else self._unrouted()

    def _unrouted(self) -> Components:
        if is_alone(self.model):
            return Components((0,), ((),), (1.0,))
        if self.rule.name != "product":
            raise EngineError(
                f"the engine runs the rules 'mixture' and 'product'; this composition has {self.rule.name!r}. Use the "
                "reference path: model.generate(…), or --engine reference"
            )
        return components_of([self.weights], [1.0])

    @property
    def weights(self) -> Row:
        return tuple(map(float, self.rule.weights or (1.0,) * self.experts))

    @property
    def candidates(self) -> list[int]:
        """The experts that a router chooses from."""
        return list(self.inner.candidates(self.experts)) if self.routed else []

    def by_request(self, experts: Mapping[str, float]) -> Components:
        """Return the one component that a request names; none: the base."""
        changed_weights(self.model, experts)  # refuses unknown names
        return components_of([tuple(float(experts.get(name, 0.0)) for name in self.names[1:])], [1.0])

    def unrouted(self) -> Components:
        """Return the components of a prompt that nobody routes."""
        if self.own is not None:
            return self.own
        rows = self.inner.component_weights(self.experts).tolist()
        return components_of(rows, self.inner.unrouted_prior(self.experts).tolist(), self.inner.switch_prob)

    def by_route(self, route: Route) -> Components:
        """Return the components of a prompt with this route."""
        route = route.among([self.names[number] for number in self.candidates])
        rule = self.inner
        active = route.active(rule.alone, rule.most)
        numbers = [number for number in self.candidates if self.names[number] in active]
        prior = rule.component_prior(torch.tensor([rule.active_prior(route.prior, active, self.names)]))[0].tolist()
        return components_of(rule.component_weights(self.experts, numbers).tolist(), prior, rule.switch_prob)
