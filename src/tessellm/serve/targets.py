"""The models of a server: the composition, which is routed, each of its members, and products of a request's own.

All of them run on the same slots. A member alone, and experts that a request names, are one component.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..diagnose.recorder import log_probabilities
from ..diagnose.row_statistics import statistics
from ..errors import RecipeError, TessellmError, nearest, quoted
from ..members import sources
from ..model import ComposedForCausalLM
from ..model.cache import Observer
from ..model.variants import changed_weights, check_alone, check_rule_name, speakers_of
from ..routing.route import BASE
from ..rules import ComposedRule, Explanation, Product
from .refusals import Refusal, bad

KEPT = 64  # observers that are remembered
MOST_TOP = 20  # log-probabilities that a client may ask for
SHOWN = (  # of what a trace measures
    "owner_BT", "share_BTM", "log_z_BT", "clash_BT", "gap_BT", "novel_BT", "divergence_BTK", "top_ids_BTNC",
    "top_logprobs_BTNC",
)  # fmt: skip
POSTERIOR = "law_BTL"  # of every member's own component, then of products


@dataclass(frozen=True, eq=False)
class Target:
    """What a request is for; `experts` None is the composition as it mixes."""

    model: str
    experts: Mapping[str, float] | None
    trace: Observer


class Targets:
    """The models of one server, by name. `members` are by the ids that are listed: their names, or NAME:MEMBER where
    the composition has that name itself; `aliases` are known too."""

    def __init__(self, model: ComposedForCausalLM, name: str):
        self.model, self.name = model, name
        names = model.config.member_names
        self.members = {f"{name}:{member}" if member == name else member: number for number, member in enumerate(names)}
        self.names = [name, *self.members]
        self.aliases = {f"{name}:{member}": number for number, member in enumerate(names)}
        self.aliases |= {base: 0 for base in sources.names_of(self._source(0)) if base not in self.names}
        own = model.rule.name
        self.rules = [own] if own == Product.name or not self.members else [own, Product.name]
        self._ends = tuple(tuple(member.get("end_ids", ())) for member in model.config.members)
        self._tracer = lru_cache(maxsize=KEPT)(self._make_tracer)

    def number_of(self, name: str) -> int | None:
        """Return the member that has this name; None: the composition, or nobody."""
        return None if name == self.name else self.members.get(name, self.aliases.get(name))

    def source_of(self, number: int) -> str | None:
        """Return where a member came from, as a user would write it."""
        return next(iter(sources.names_of(self._source(number))), None)

    def _source(self, number: int) -> sources.Source | None:
        loaded = self.model.loaded_members
        return loaded[number].source if number < len(loaded) else None

    def find(
        self,
        name: str,
        rule: str | None = None,
        weights: Mapping[str, float] | None = None,
        experts: str | Mapping[str, float] | None = None,
    ) -> Target:
        """Return the target of a request. `experts`: one member, or weights of a product of these alone; `rule`
        "product": Eq. 2 of all experts, by `weights` or their own."""
        number = self.number_of(name)
        if number is None and name != self.name:
            as_speaker = name.startswith(f"{self.name}:")  # as the command line names members
            speakers = speakers_of(self.name, self.model.config.member_names) if as_speaker else self.names
            raise _unknown("model", name, "model", speakers)
        with _refused("tessellm"):
            if number is not None:
                check_alone(name, rule, weights)
            if experts is not None and (number is not None or rule is not None or weights is not None):
                raise RecipeError("experts are of the composition by themselves: leave out rule, weights or the member")
        if experts is not None:
            return self._target(name, self._named(experts))
        if number is not None:
            return self._target(name, self._alone(number))
        with _refused("tessellm.rule"):
            if rule is not None:
                check_rule_name(rule)
            if rule not in (None, *self.rules):
                raise RecipeError(
                    f"there is no rule {quoted(str(rule))} for a request; {nearest(str(rule), self.rules)}"
                )
        with _refused("tessellm.weights"):
            changed = changed_weights(self.model, weights or {})
        if rule in (None, self.rules[0]) and changed == self.model.config.weights:
            return self._target(name, None)
        return self._target(name, dict(zip(self.model.config.member_names[1:], changed, strict=True)))

    def _named(self, experts: str | Mapping[str, float]) -> Mapping[str, float]:
        """Return the weights that a request's `experts` mean."""
        names = self.model.config.member_names
        for each in [experts] if isinstance(experts, str) else experts:
            if each not in names or (each == BASE and not isinstance(experts, str)):
                raise _unknown("expert", each, "tessellm.experts", names if isinstance(experts, str) else names[1:])
        if isinstance(experts, str):
            return self._alone(names.index(experts))
        with _refused("tessellm.experts"):
            changed_weights(self.model, experts)  # refuses weights that are too large
        return experts

    def _alone(self, number: int) -> Mapping[str, float]:
        return {self.model.config.member_names[number]: 1.0} if number else {}

    def _target(self, name: str, experts: Mapping[str, float] | None) -> Target:
        weights = None
        if experts is not None and len(self._ends) > 1:
            weights = tuple(experts.get(member, 0.0) for member in self.model.config.member_names[1:])
        return Target(name, experts if len(self._ends) > 1 else None, self._tracer(weights))

    def _make_tracer(self, weights: tuple[float, ...] | None) -> Observer:
        rule = self.model.rule
        return tracer(rule if weights is None else rule.with_("product", weights), self._ends)


def _unknown(what: str, name: str, param: str, known: Iterable[str]) -> Refusal:
    return Refusal(404, f"there is no {what} {quoted(name)}; {nearest(name, known)}", param, "model_not_found")


@contextmanager
def _refused(param: str) -> Iterator[None]:
    """Turn what cannot be asked for into a refusal that names the parameter."""
    try:
        yield
    except TessellmError as error:
        raise bad(str(error), param) from error


def top(logp_MB1V: Tensor, token_B1: Tensor, composed_B1V: Tensor, why: Explanation) -> dict[str, Tensor]:
    """Observe the likeliest tokens and their log-probabilities."""
    logp_BC, id_BC = composed_B1V[:, 0].topk(min(MOST_TOP, composed_B1V.shape[-1]), -1)
    return {"ids": id_BC, "logps": logp_BC}


def tracer(rule: ComposedRule, ends: tuple[tuple[int, ...], ...]) -> Observer:
    """Make an observer of what `tessellm.trace` says of a row, as far as it is shown."""

    def watch(logp_MB1V: Tensor, token_B1: Tensor, composed_B1V: Tensor, why: Explanation) -> dict[str, Tensor]:
        found = statistics(logp_MB1V, composed_B1V, rule, ends, why)
        columns = {name: column for name in SHOWN if (column := getattr(found, name)) is not None}
        columns |= {name: column for name, column in why.more.items() if name == POSTERIOR}
        return {
            **top(logp_MB1V, token_B1, composed_B1V, why),
            **{name.rpartition("_")[0]: column[:, 0] for name, column in columns.items()},
            "logprob": log_probabilities(logp_MB1V, composed_B1V, token_B1)[:, 0],
        }

    return torch.inference_mode()(watch)
