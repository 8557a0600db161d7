"""The table's models: members as Llamas, merges with their strengths tuned, and a composition for each column."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from tessellm.compose import compose
from tessellm.model import ComposedForCausalLM
from tessellm.model.variants import alone

from ..common.stacked import Params, Shape, to_llama
from ..merging.merges import METHODS
from ..skills.baselines import merge
from .gold import Gold, misses
from .members import EXPERTS

COMPOSED, EQ2 = "composed", "composed by Eq. 2"
LORA = "LoRA "  # before the name of a column
COLUMNS = ("base", *EXPERTS, COMPOSED, EQ2, *METHODS, *(LORA + name for name in (*EXPERTS, COMPOSED)))
LARGER = {"task-arithmetic": (1.2, 1.5), "dare": (1.2, 1.5), "ties": (2.0, 2.5)}  # strengths beyond mergekit's usual


def llama(params: Params, shape: Shape, member: int, tokenizer: Any, device: str) -> LlamaForCausalLM:
    """One member, in half precision on a GPU."""
    model: Any = to_llama(params, shape, member)
    for config in (model.config, model.generation_config):
        config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    return model.to(device, torch.bfloat16 if device == "cuda" else torch.float32)


def merged(method: str, strength: float, members: Sequence[LlamaForCausalLM], seed: int) -> LlamaForCausalLM:
    """Base and experts made one by averaging weights, in float32."""
    states: list[dict[str, Tensor]] = [member.state_dict() for member in members]
    stacked = {name: torch.stack([state[name].float() for state in states]) for name in states[0]}
    model = copy.deepcopy(members[0])
    model.load_state_dict({name: tensor_M[0] for name, tensor_M in merge(method, stacked, strength, seed).items()})
    return model


def tuned(
    method: str, members: Sequence[LlamaForCausalLM], development: Mapping[str, Gold], seed: int
) -> tuple[LlamaForCausalLM, dict[str, Any]]:
    """The merge with the strength that writes the most development texts exactly, on the average of their kinds; of
    several, the one that finds them most likely."""

    def worth(strength: float) -> tuple[float, float]:
        return development_score(merged(method, strength, members, seed), development)

    strengths = (*METHODS[method].strengths, *LARGER.get(method, ())) or (METHODS[method].default,)
    scores = {strength: worth(strength) for strength in strengths}
    best = max(scores, key=lambda strength: scores[strength])
    told = {"strength": best, "development": {str(strength): score[0] for strength, score in scores.items()}}
    return merged(method, best, members, seed), told


@torch.no_grad()
def development_score(model: LlamaForCausalLM, development: Mapping[str, Gold]) -> tuple[float, float]:
    """The share of texts that the model would write exactly, and its mean log-likelihood of a text."""
    shares, likelihoods = [], []
    for gold in development.values():
        wrong_BT, logp_BT = misses([model], gold, lambda logp_MBTV, some: logp_MBTV[0])
        shares.append(1 - wrong_BT.any(1).float().mean().item())
        likelihoods.append(logp_BT.sum(1).mean().item())
    return sum(shares) / len(shares), sum(likelihoods) / len(likelihoods)


def columns(
    base: LlamaForCausalLM,
    experts: Mapping[str, LlamaForCausalLM],
    lora: Mapping[str, LlamaForCausalLM],
    merges: Mapping[str, LlamaForCausalLM],
    tokenizer: Any,
) -> dict[str, ComposedForCausalLM]:
    """Every column of the table as a composition, so that one engine writes for all of them."""
    singles = {**experts, **{f"lora_{name}": model for name, model in lora.items()}, **merges}
    everyone = compose(base, {name.replace("-", "_"): model for name, model in singles.items()}, tokenizer=tokenizer)
    made = {name: alone(everyone, name) for name in ("base", *EXPERTS)}
    made[COMPOSED] = compose(base, experts, tokenizer=tokenizer)
    made[EQ2] = compose(base, experts, rule="product", tokenizer=tokenizer)
    made |= {name: alone(everyone, name.replace("-", "_")) for name in merges}
    made |= {LORA + name: alone(everyone, f"lora_{name}") for name in lora}
    made[LORA + COMPOSED] = compose(base, lora, tokenizer=tokenizer)
    return made
