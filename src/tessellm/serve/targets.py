"""The models of a server: the composition, each of its members, and the composition with other weights.

All of them run on the same slots. A member alone, and experts with weights of a request's own, are one component.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..diagnose.recorder import log_probabilities
from ..diagnose.row_statistics import statistics
from ..errors import RecipeError, TessellmError, nearest, quoted
from ..model import ComposedForCausalLM
from ..model.cache import Observer
from ..model.variants import changed_weights, check_alone, check_rule_name, no_such_speaker, speakers_of
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
    """The models of one server, by name."""

    def __init__(self, model: ComposedForCausalLM, name: str):
        self.model, self.name = model, name
        self.names = speakers_of(name, model.config.member_names)
        self.members = {member: number for number, member in enumerate(self.names[1:])}
        own = model.rule.name
        self.rules = [own] if own == Product.name or not self.members else [own, Product.name]
        self._ends = tuple(tuple(member.get("end_ids", ())) for member in model.config.members)
        self._tracer = lru_cache(maxsize=KEPT)(self._make_tracer)

    def find(self, name: str, rule: str | None = None, weights: Mapping[str, float] | None = None) -> Target:
        """Return the target of a request: `rule` "product" is Eq. 2 of the experts, by these weights or their own."""
        if name not in self.names:
            message = no_such_speaker(name, self.name, self.model.config.member_names)
            raise Refusal(404, message, "model", "model_not_found")
        if name in self.members:
            with _refused("tessellm"):
                check_alone(name, rule, weights)
            member = self.model.config.member_names[self.members[name]]
            return self._target(name, {} if self.members[name] == 0 else {member: 1.0})
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

    def _target(self, name: str, experts: Mapping[str, float] | None) -> Target:
        weights = None
        if experts is not None and len(self._ends) > 1:
            weights = tuple(experts.get(member, 0.0) for member in self.model.config.member_names[1:])
        return Target(name, experts if len(self._ends) > 1 else None, self._tracer(weights))

    def _make_tracer(self, weights: tuple[float, ...] | None) -> Observer:
        rule = self.model.rule
        return tracer(rule if weights is None else rule.with_("product", weights), self._ends)


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
