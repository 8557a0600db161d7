"""How each expert usually acts: what the rule `belief` measures a prompt against.

The members read some dozens of prompts of all kinds once, when they are composed; the result is part of the rule and is
saved with it. Needs a chat template, which says where a prompt opens and where an answer begins; without one there is
nothing to measure. Nothing is trained.

Shapes: M members (0 is the base), K experts, P prompts, T time, V vocabulary, N numbers of an expert.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..rules import DEFAULT, WITHOUT_CHAT, Product, RuleLike, Weights, normalised, tilt
from ..rules.belief import Belief
from ..rules.laws import activity
from .chat_marks import before_answer, before_user, common_beginning, in_chat

if TYPE_CHECKING:
    from .composed import ComposedForCausalLM

FEWEST = 8  # prompts that fit into the context; fewer tell no habit
AT_ONCE = 1 << 27  # logits of prompts that are read together
ROWS_ON_CPU = 320  # positions of a pass: products of more are no faster there, and the more, the more padding
READ_ON_CPU = 1 << 20  # log-probabilities of a prompt that are looked at together: as many as its cache holds
SPREAD = 3.0  # by which each expert's sum of deviations deviates on usual prompts: numbers that go together count less
SMALLEST = 1e-2  # deviation: an expert that always does the same is not told from one that hardly differs


def prepared(model: ComposedForCausalLM, rule: RuleLike, weights: Weights) -> RuleLike:
    """Any rule as it was given, but `belief` by its name, or with styles alone, with the habits of the model's other
    experts, and the default as it suits the model."""
    given: Any = {"name": rule} if isinstance(rule, str) else rule
    if not isinstance(given, Mapping) or not is_unread(given) or len(weights) != len(model.members) - 1:
        return rule
    unread = Belief(styles=given.get("styles", model.config.styles))
    name = default_rule(model) if model.config.styles else given["name"]
    if name == Product.name:
        return name
    if name == DEFAULT and len(weights) == 1:
        return WITHOUT_CHAT  # by which one expert speaks for itself
    if len(unread.styles) >= len(weights) or max(unread.styles, default=0) > len(weights):
        return rule  # which is refused
    found = calibrated(model, unread, weights)
    return WITHOUT_CHAT if name == DEFAULT and not found.calibrated else found


def is_unread(entry: Mapping[str, Any]) -> bool:
    """Tell whether a rule's entry leaves it to the model to read the experts' habits."""
    return entry.get("name") in (DEFAULT, Belief.name) and set(entry) <= {"name", "styles"}


def default_rule(model: ComposedForCausalLM) -> str:
    """Name the rule that composing these members by default gives, without reading their habits."""
    if model.config.styles:
        return Belief.name if len(model.config.styles) < len(model.members) - 1 else Product.name
    return Belief.name if len(model.members) > 2 and can_be_read(model) else WITHOUT_CHAT


def can_be_read(model: ComposedForCausalLM) -> bool:
    """Tell whether there is a chat template that says where prompts open and answers begin."""
    return _marked(model, Belief()) is not None


def calibrated(model: ComposedForCausalLM, rule: Belief, weights: Weights) -> Belief:
    """The rule with the habits of the model's weighted experts, and with where prompts open and answers begin.
    Unchanged where the tokenizer has no chat template that marks the beginning of an answer."""
    marked = _marked(model, rule)
    if marked is None:
        return rule
    rule, prompts = marked
    return replace(rule, habits=habits_of(torch.cat(list(_numbers(model, rule, prompts, weights)))).tolist())


def habits_of(number_PKN: Tensor) -> Tensor:
    """Means and scaled deviations of numbers on usual prompts: [K, 2N]."""
    mean_KN, deviation_KN = number_PKN.mean(0), number_PKN.std(0).clamp_min(SMALLEST)
    spread_K = ((number_PKN - mean_KN) / deviation_KN).sum(-1).std(0).clamp_min(SMALLEST)
    return torch.cat([mean_KN, deviation_KN * spread_K[:, None] / SPREAD], -1)


def _marked(model: ComposedForCausalLM, rule: Belief) -> tuple[Belief, list[list[int]]] | None:
    """The rule with where prompts open and answers begin, and the usual prompts; None where nothing marks that."""
    limit = model.config.max_position_embeddings
    prompts = [ids for ids in in_chat(model.tokenizer) if not limit or len(ids) <= limit]
    opening, turn = common_beginning(prompts), before_answer(model.tokenizer, prompts)
    if len(prompts) < FEWEST or not turn or len(opening) + len(turn) >= min(map(len, prompts)):
        return None
    user, spaces = before_user(model.tokenizer)
    user = user[-rule.span :]
    return replace(rule, opening=opening, turn=turn[-rule.span :], user=user, spaces=spaces), prompts


def _batches(prompts: Sequence[list[int]], rows: int) -> Iterator[list[list[int]]]:
    """Prompts of about one length together, of so many positions with padding: few passes, little padding."""
    batch: list[list[int]] = []
    for prompt in sorted(prompts, key=len):
        if batch and (len(batch) + 1) * len(prompt) > rows:
            yield batch
            batch = []
        batch.append(prompt)
    yield batch


@torch.inference_mode()
def _numbers(
    model: ComposedForCausalLM, rule: Belief, prompts: Sequence[list[int]], weights: Weights
) -> Iterator[Tensor]:
    """The numbers of every expert where the answers to the prompts would begin, [P, K, N] for some at a time. All
    prompts open alike: members read that once. Padding comes last, where it changes nothing before it."""
    call: Any = model
    opening = torch.tensor([rule.opening], device=model.device)
    opened = call(opening, use_cache=True).past_key_values if rule.opening else None
    own = [name for number, name in enumerate(model.members) if number not in rule.styles]
    weights = [weight for number, weight in enumerate(weights, 1) if number not in rule.styles]
    rows = AT_ONCE // (len(own) * model.config.vocab_size)
    rows = min(rows, ROWS_ON_CPU) if model.device.type == "cpu" else rows
    for batch in _batches([prompt[len(rule.opening) :] for prompt in prompts], rows):
        longest = len(batch[-1])
        input_ids = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in batch], device=model.device)
        caches = _repeated(opened, len(batch)) if opened else [None] * len(model.members)
        cache_of = dict(zip(model.members, caches, strict=True))
        logits_M = [model.member_logits(name, input_ids, cache_of[name], 0, {}) for name in own]
        counted = [slice(max(0, len(prompt) - rule.span), len(prompt)) for prompt in batch]
        yield torch.stack(
            [_acts([logits[p : p + 1, at] for logits in logits_M], weights) for p, at in enumerate(counted)]
        ).cpu()


def _acts(logits_M: Sequence[Tensor], weights: Weights) -> Tensor:
    """The numbers of every expert behind one prompt, [K, N], of members' logits [1, T, V]; on a CPU of a few rows at a
    time, which stay in its cache."""
    _, steps, vocabulary = logits_M[0].shape
    size = max(1, READ_ON_CPU // (len(logits_M) * vocabulary)) if logits_M[0].device.type == "cpu" else steps
    averaged = []
    for start in range(0, steps, size):
        logp_MBTV = normalised([logits[:, start : start + size] for logits in logits_M])
        if any(weight != 1 for weight in weights):
            logp_MBTV = tilt(logp_MBTV, weights)
        _, averaged_BTKA, now_BTKN = activity(logp_MBTV)
        averaged.append(averaged_BTKA[0])
    return torch.cat([torch.cat(averaged).mean(0), now_BTKN[0, -1]], -1).float()


def _repeated(opened: Any, times: int) -> list[Any]:
    """The members' caches of one text, for so many prompts that go on from it."""
    caches = copy.deepcopy(opened)
    caches.batch_repeat_interleave(times)
    return caches.caches
