"""Who can be asked to speak: the composition, each of its members, and the composition under other rules and weights.

All of them run on the same slots: a pass computes every member once, and each request combines them as it likes. A
member alone is the rule `product` with that expert's weight 1 and all others 0, which is that member exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..decoding.voices import Voice
from ..diagnose.recorder import log_probabilities
from ..diagnose.row_statistics import statistics
from ..errors import RecipeError, TessellmError
from ..model import ComposedForCausalLM
from ..model.cache import Observer
from ..model.habits import can_be_read
from ..model.variants import changed_weights, check_alone, check_rule_name, meant_rule, no_such_speaker, speakers_of
from ..rules import DEFAULT, RULES, ComposedRule, Explanation
from ..rules.belief import Belief
from .refusals import Refusal, bad

KEPT = 64  # voices that are remembered
MOST_TOP = 20  # log-probabilities that a client may ask for
SHOWN = (  # of what a trace measures
    "owner_BT", "share_BTM", "log_z_BT", "clash_BT", "gap_BT", "novel_BT", "divergence_BTK", "top_ids_BTNC",
    "top_logprobs_BTNC", "evidence_BTM", "trusted_BTM", "interference_BT", "blended_BT",
)  # fmt: skip
LAW = "law_BTL"  # what a rule that is a mixture believes


@dataclass(frozen=True, eq=False)
class NamedVoice:
    """A voice with its name; `voice` None is the composition as it was made."""

    model: str
    voice: Voice | None
    trace: Observer
    ends: frozenset[int]


class Speakers:
    """The models of one server, by name."""

    def __init__(self, model: ComposedForCausalLM, name: str):
        self.model, self.name = model, name
        self.names = speakers_of(name, model.config.member_names)
        self.members = {member: number for number, member in enumerate(self.names[1:])}
        self.window = max(entry.make().window for entry in RULES.values())
        self._ends = [tuple(member.get("end_ids", ())) for member in model.config.members]
        self._own = self._speaker(name, None)
        self._meant = {rule: meant_rule(model, rule) for rule in (DEFAULT, *RULES)}
        self._needs_habits = can_be_read(model)
        self._member = lru_cache(maxsize=None)(self._make_member)
        self._other = lru_cache(maxsize=KEPT)(self._make_other)

    def find(self, name: str, rule: str | None = None, weights: Mapping[str, float] | None = None) -> NamedVoice:
        if name not in self.names:
            message = no_such_speaker(name, self.name, self.model.config.member_names)
            raise Refusal(404, message, "model", "model_not_found")
        if name in self.members:
            with _refused("tessellm"):
                check_alone(name, rule, weights)
            return self._member(name)
        if rule is None and weights is None:
            return self._own
        with _refused("tessellm.weights"):
            changed = changed_weights(self.model, weights or {})
        return self._other(rule, changed)

    def _make_member(self, name: str) -> NamedVoice:
        number = self.members[name]
        weights = [float(expert == number) for expert in range(1, len(self._ends))]
        ends = self._ends[number] or self.model.config.eos_token_id or ()
        rule = self.model.rule.with_("product", weights, "rule")
        return self._speaker(name, Voice(rule, frozenset(ends)))

    def _make_other(self, rule: str | None, weights: tuple[float, ...]) -> NamedVoice:
        with _refused("tessellm.rule"):
            complete = self.model.rule.with_(None if rule is None else self._meant_rule(rule), weights)
        return self._speaker(self.name, Voice(complete, frozenset(self.model.config.eos_token_id or ())))

    def _meant_rule(self, rule: str) -> str | None:
        """Return what a name means here; refuse `belief` where reading habits would hold everyone up."""
        check_rule_name(rule)
        meant = self._meant[rule]
        if meant == Belief.name and self._needs_habits:
            raise RecipeError(
                f"this server has not read how the experts usually act, which the rule {meant!r} goes by: start it "
                f"with --rule {meant}, or compose the members by it"
            )
        return meant

    def _speaker(self, name: str, voice: Voice | None) -> NamedVoice:
        ends = voice.ends if voice else frozenset(self.model.config.eos_token_id or ())
        return NamedVoice(name, voice, tracer(voice.rule if voice else self.model.rule, tuple(self._ends)), ends)


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
        columns |= {name: column for name, column in why.more.items() if name == LAW}
        return {
            **top(logp_MB1V, token_B1, composed_B1V, why),
            **{name.rpartition("_")[0]: column[:, 0] for name, column in columns.items()},
            "logprob": log_probabilities(logp_MB1V, composed_B1V, token_B1)[:, 0],
        }

    return torch.inference_mode()(watch)
