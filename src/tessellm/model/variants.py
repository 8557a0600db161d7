"""Variants of a composition over the same weights: a member alone, another rule, other weights, a merge.

What a user may ask for instead of the composition as it was made, with the words for what cannot be asked for: the
command line and the server use the same. Knows neither files nor requests.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, cast

from transformers import PreTrainedModel

from ..errors import MemberError, MissingExtraError, RecipeError, nearest, quoted
from ..rules import DEFAULT, LARGEST_WEIGHT, FunctionRule, RuleLike, find_rule, first_member, resolved, rule_names
from ..vocabulary import Alignment
from .composed import ComposedForCausalLM
from .config import ComposedConfig

ALONE = FunctionRule("alone", first_member)  # the rule of a composition that has one member


def speakers_of(name: str, members: Sequence[str]) -> list[str]:
    """List who can be asked to speak: the composition, and every member as NAME:MEMBER."""
    return [name, *(f"{name}:{member}" for member in members)]


def no_such_speaker(asked: str, name: str, members: Sequence[str]) -> str:
    return f"there is no model {quoted(asked)}; {nearest(asked, speakers_of(name, members))}"


def check_alone(asked: str, rule: Any = None, weights: Any = None) -> None:
    """Refuse a rule or weights for a member that speaks alone."""
    if rule is not None or weights is not None:
        raise RecipeError(f"{asked!r} is a member and speaks alone: rules and weights are the composition's")


def check_rule_name(rule: str) -> None:
    try:
        if find_rule(resolved(rule)) is None:
            raise RecipeError(f"there is no rule {quoted(rule)}; {nearest(rule, [DEFAULT, *rule_names()])}")
    except ValueError as error:
        raise MissingExtraError(str(error)) from None


def meant_rule(model: ComposedForCausalLM, rule: str) -> str | None:
    """Return the rule that a name means for these members; None for their own, with the parameters that it has."""
    check_rule_name(rule)
    name = resolved(rule)
    return None if name == model.config.rule["name"] else name


def changed_weights(model: ComposedForCausalLM, given: Mapping[str, float]) -> tuple[float, ...]:
    """Return the weight of every expert: as given, or else the composition's own."""
    experts = model.config.member_names[1:]
    for name, weight in given.items():
        if name not in experts:
            raise MemberError(f"there is no expert {quoted(name)}; {nearest(name, experts)}")
        if not abs(weight) <= LARGEST_WEIGHT:
            raise MemberError(f"expected a weight within ±{LARGEST_WEIGHT:g}; got {weight}")
    return tuple(float(given.get(name, weight)) for name, weight in zip(experts, model.config.weights, strict=True))


def alone(model: ComposedForCausalLM, name: str) -> ComposedForCausalLM:
    """Make one member a model of its own, over the composition's vocabulary. Weights are not copied."""
    if name not in model.members:
        raise MemberError(f"there is no member {name!r}; {nearest(name, model.members)}")
    entry = next(entry for entry in model.config.members if entry["name"] == name)
    return _single(model, entry, model.member(name), model.alignments[name])


def is_alone(model: ComposedForCausalLM) -> bool:
    """Tell whether this is one member of a composition, or a merge, rather than a composition."""
    return len(model.members) == 1


def in_place_of_all(model: ComposedForCausalLM, name: str, merged: PreTrainedModel) -> ComposedForCausalLM:
    """Make a merge of a composition's members a model of its own; it ends where any member would."""
    entry = {"name": name, "kind": "full", "end_ids": list(model.config.eos_token_id or ())}
    return _single(model, entry, merged, model.alignments["base"])


def with_rule(
    model: ComposedForCausalLM, rule: RuleLike, weights: Sequence[float] | None = None
) -> ComposedForCausalLM:
    """Put the same members under another rule or other weights; return the model itself where nothing differs."""
    own = model.config.rule["name"] == rule
    if own and (weights is None or tuple(weights) == model.config.weights):
        return model
    members = {name: model.member(name) for name in model.members}
    config = cast(ComposedConfig, copy.deepcopy(model.config))
    other = _dressed(ComposedForCausalLM(config, members, model.alignments, model.rule.rule), model)
    other.set_rule(None if own else rule, weights)
    return other


def _single(
    model: ComposedForCausalLM, entry: Mapping[str, Any], member: PreTrainedModel, alignment: Alignment
) -> ComposedForCausalLM:
    name = entry["name"]
    config = cast(ComposedConfig, copy.deepcopy(model.config))
    config.members = [{**entry, "weight": 1.0}]
    config.rule = ALONE.describe()
    config.eos_token_id = list(entry.get("end_ids", ())) or config.eos_token_id
    single = _dressed(ComposedForCausalLM(config, {name: member}, {name: alignment}, ALONE), model)
    single.generation_config.eos_token_id = config.eos_token_id
    return single


def _dressed(made: ComposedForCausalLM, model: ComposedForCausalLM) -> ComposedForCausalLM:
    made.generation_config = copy.deepcopy(model.generation_config)
    made.tokenizer, made.router, made.loaded_members = model.tokenizer, model.router, model.loaded_members
    return made
