"""The columns of a table: base and experts alone, rules, merges with tuned strengths, Arrow, a router, trained ones.

A column is a model of the library's (`compose`, `evaluate`'s columns), made when it is needed; a router is as many
models as there are experts, and says which of them answers which prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from tessellm.members.sources import digest, weight_files
from tessellm.model import ComposedForCausalLM
from tessellm.model.variants import alone, in_place_of_all, with_rule
from tessellm.rules import Mixture

from .members import Experts
from .packing import Text
from .peers import METHODS, arrow, merged
from .plan import BLENDS, EQ2, Plan
from .reading import prompt_nats

ROUTER, ALL, STYLED = "router", "one LoRA on all data", "mixture, capitals as style"
Make = Callable[[], ComposedForCausalLM]
Tuned = Callable[[Mapping[str, Mapping[float, Make]]], dict[str, float]]  # of models by method and strength: the best


@dataclass(frozen=True)
class Column:
    """One column. `identity` is what its results depend on; `rule` or `member` is what it is of the composition."""

    name: str
    kind: str  # base, expert, rule, merge, arrow, router, trained
    identity: Any
    make: Make | None = None  # None: a router
    rule: str | None = None
    member: str | None = None

    @cached_property
    def model(self) -> ComposedForCausalLM:
        assert self.make is not None
        return self.make()

    def release(self) -> None:
        """Forget the model; it is made again if needed."""
        self.__dict__.pop("model", None)


def own_columns(experts: Experts, plan: Plan) -> list[Column]:
    """Base, experts, Eq. 2, and the rules of the table, over one composition."""
    composed, found = experts.composed, []
    for name in composed.members:
        kind = "base" if name == "base" else "expert"
        identity: list[Any] = [kind, experts.base_name, experts.identity.get(name)]
        found.append(Column(name, kind, identity, partial(alone, composed, name), member=name))
    for rule in plan.rules:
        identity = ["rule", experts.base_name, list(experts.identity.items()), rule]
        found.append(Column(rule_title(rule), "rule", identity, partial(with_rule, composed, rule), rule=rule))
    if tuple(experts.adapters) in BLENDS.values() and Mixture.name in plan.rules:  # the second of a blend is a style
        styled = {"name": Mixture.name, "styles": [2]}
        identity = ["rule", experts.base_name, list(experts.identity.items()), styled]
        found.append(Column(STYLED, "rule", identity, partial(with_rule, composed, styled), rule=Mixture.name))
    return found


def rule_title(rule: str) -> str:
    """As a table shows it."""
    return "Eq. 2" if rule == EQ2 else f"{rule} (default)" if rule == Mixture.name else rule


def peer_columns(experts: Experts, plan: Plan, tuned: Tuned, seed: int = 0) -> list[Column]:
    """Merges with the strength that `tuned` chooses for each method, Arrow, and the router."""
    composed, base = experts.composed, experts.base.model
    what = [experts.base_name, list(experts.identity.items())]

    def averaged(method: str, strength: float) -> ComposedForCausalLM:
        members = [composed.member(name) for name in experts.adapters]
        return in_place_of_all(composed, method, merged(base, members, method, strength, seed))

    def routed(top_k: int, name: str) -> ComposedForCausalLM:
        return in_place_of_all(composed, name, arrow(base, experts.adapters, top_k))

    choices: dict[str, dict[float, Make]] = {
        method: {
            strength: partial(averaged, method, strength) for strength in plan.strengths or METHODS[method].strengths
        }
        for method in plan.merges
    }
    found = []
    for method, strength in tuned(choices).items():
        identity = ["merge", method, strength, seed, *what]
        found.append(Column(f"{method} λ={strength:g}", "merge", identity, choices[method][strength]))
    for top_k in plan.arrow:
        name = f"Arrow, top-k {top_k}"
        found.append(Column(name, "arrow", ["arrow", top_k, *what], partial(routed, top_k, name)))
    return [*found, *([Column(ROUTER, "router", ["router", *what])] if plan.router else [])]


def trained_column(experts: Experts, name: str, folder: Path | None) -> list[Column]:
    """An adapter trained on just what is asked for, where there is one."""
    if folder is None:
        return []
    identity = ["trained", experts.base_name, digest(weight_files(folder))]
    return [Column(name, "trained", identity, lambda: experts.in_place_of_all("trained", folder))]


def routes(experts: Sequence[Column], texts: Sequence[Text], batch_size: int) -> list[int]:
    """Which expert finds each prompt likeliest."""
    nats = [prompt_nats(expert.model, texts, batch_size) for expert in experts]
    return [min(range(len(experts)), key=lambda expert: nats[expert][text]) for text in range(len(texts))]
