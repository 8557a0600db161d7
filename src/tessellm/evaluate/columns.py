"""The columns of a table: each a composition, so that one protocol and one code run all of them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, cast

from transformers import PreTrainedModel

from ..errors import MemberError, nearest
from ..model import ComposedConfig, ComposedForCausalLM
from ..rules import FunctionRule, first_member
from ..vocabulary import Alignment

ALONE = FunctionRule("alone", first_member)  # the rule of a composition that has one member


def alone(model: ComposedForCausalLM, name: str) -> ComposedForCausalLM:
    """One member of a composition as a model of its own, over the composition's vocabulary. Weights are not copied."""
    if name not in model.members:
        raise MemberError(f"there is no member {name!r}; {nearest(name, model.members)}")
    entry = next(entry for entry in model.config.members if entry["name"] == name)
    return _single(model, entry, model.member(name), model.alignments[name])


def in_place_of_all(model: ComposedForCausalLM, name: str, merged: PreTrainedModel) -> ComposedForCausalLM:
    """A merge of a composition's members as a model of its own; it ends where any member would."""
    entry = {"name": name, "kind": "full", "end_ids": list(model.config.eos_token_id or ())}
    return _single(model, entry, merged, model.alignments["base"])


def with_rule(model: ComposedForCausalLM, rule: str, weights: Sequence[float] | None = None) -> ComposedForCausalLM:
    """The same members under another rule, which stops as suits it, or with other weights; else the model as it is."""
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
    config.rule, config.termination = ALONE.describe(), "rule"
    config.eos_token_id = list(entry.get("end_ids", ())) or config.eos_token_id
    single = _dressed(ComposedForCausalLM(config, {name: member}, {name: alignment}, ALONE), model)
    single.generation_config.eos_token_id = config.eos_token_id
    return single


def _dressed(made: ComposedForCausalLM, model: ComposedForCausalLM) -> ComposedForCausalLM:
    made.generation_config = copy.deepcopy(model.generation_config)
    made.tokenizer = model.tokenizer
    return made
