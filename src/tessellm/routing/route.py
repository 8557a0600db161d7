"""Route: what a router says of one prompt, and the interface of a router. Knows no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor, nn

BASE = "base"
ALONE = 0.5  # of the prior: a member that holds it answers alone
MOST = 4  # members that answer where none holds half


@dataclass(frozen=True)
class Route:
    """What a router says of one prompt. `prior` sums to 1 over the base and the experts that can be selected."""

    prior: Mapping[str, float]
    selected: str  # the member with the largest prior
    scores: Mapping[str, float | None] = field(
        default_factory=dict
    )  # per expert, against the threshold; None: under the floor
    threshold: float = 0.0  # scores below it leave a prompt to the base

    def active(self, alone: float = ALONE, most: int = MOST) -> tuple[str, ...]:
        """Return the members that answer: the one that holds `alone` of the prior, else the base and the likeliest
        others, `most` in all."""
        if self.prior[self.selected] >= alone:
            return (self.selected,)
        ranked = sorted((name for name in self.prior if name != BASE), key=lambda name: -self.prior[name])
        return (BASE, *ranked[: most - 1])

    def among(self, experts: Sequence[str]) -> Route:
        """Return the route among the base and these experts: the prior of all others is shared out in proportion, and
        is the base's where these have none."""
        if not all(share >= 0 for share in self.prior.values()) or not 0 < sum(self.prior.values()) < float("inf"):
            raise ValueError(
                f"a prior is made of numbers from 0 to 1 with a sum of 1; the router gave {dict(self.prior)}"
            )
        shares = {name: float(self.prior.get(name, 0.0)) for name in (BASE, *experts)}
        total = sum(shares.values())
        if not total:
            shares[BASE] = total = 1.0
        prior = {name: share / total for name, share in shares.items()}
        scores = {name: self.scores[name] for name in experts if name in self.scores}
        return Route(prior, max(prior, key=lambda name: prior[name]), scores, self.threshold)


@dataclass(frozen=True)
class RoutedPrompt:
    """A prompt as a router sees it."""

    ids: Sequence[int]  # all token ids, template included
    user: slice  # the span of the last user message
    energy_TK: Tensor  # per prompt token and expert; what `EnergyTap.take` returned for it


class EnergyTap(Protocol):
    """Collects energies while the base runs."""

    def take(self) -> Tensor:
        """Return energy_BTK of the forward passes since the last take, on the CPU: [rows, tokens, experts]."""


class Router(Protocol):
    """What decides from a prompt which members should answer. Replace it by an object of your own."""

    def tap(self, base: nn.Module) -> AbstractContextManager[EnergyTap]:
        """Collect energies from the inputs of the base's layers, in every forward pass inside the context. `base` may
        be any module tree that has the base's layers at the base's paths."""

    def route(self, prompts: Sequence[RoutedPrompt]) -> list[Route]:
        """Decide for each prompt."""
