"""The columns of a table: each a composition, so that one protocol and one code run all of them."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor

from ..config import ComposedConfig
from ..errors import MemberError, nearest
from ..model import ComposedForCausalLM


@dataclass(frozen=True)
class Alone:
    """The rule of a composition that has one member: that member speaks."""

    name = "alone"
    window = 0

    def __call__(self, logp_MBTV: Tensor, tokens_BT: Tensor, mask_BT: Tensor, state: Any) -> tuple[Tensor, Any]:
        return logp_MBTV[0], None


def alone(model: ComposedForCausalLM, name: str) -> ComposedForCausalLM:
    """One member of a composition as a model of its own, over the composition's vocabulary. Weights are not copied."""
    if name not in model.members:
        raise MemberError(f"there is no member {name!r}; {nearest(name, model.members)}")
    config = cast(ComposedConfig, copy.deepcopy(model.config))
    config.members = [{**entry, "weight": 1.0} for entry in config.members if entry["name"] == name]
    config.rule, config.termination = {"name": Alone.name}, "rule"
    config.eos_token_id = list(config.members[0].get("end_ids", ())) or config.eos_token_id
    single = ComposedForCausalLM(config, {name: model.member(name)}, {name: model.alignments[name]}, Alone())
    single.generation_config = copy.deepcopy(model.generation_config)
    single.generation_config.eos_token_id = config.eos_token_id
    single.tokenizer = model.tokenizer
    return single
