"""Likelihood of reference answers: of several rules and members in one pass over the members, of any model by itself.

Shapes: M members, B batch, T time, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tessellm.evaluate.scoring import score
from tessellm.model import ComposedForCausalLM
from tessellm.model.cache import ComposedCache
from tessellm.model.rows import slices
from tessellm.rules import ComposedRule
from tessellm.text.reference import left_padded

from .packing import Text


class Read(NamedTuple):
    """Nats of the answers, and how many tokens those have, text by text."""

    nats: list[float]
    tokens: list[int]

    @property
    def mean(self) -> float:
        """Nats per token."""
        return sum(self.nats) / max(1, sum(self.tokens))


def read_alone(model: ComposedForCausalLM, texts: Sequence[Text], batch_size: int) -> Read:
    """One model's, by the reference."""
    scores = score(model, texts, batch_size)
    return Read([-each.logprob for each in scores], [len(answer) for _, answer in texts])


def prompt_nats(model: ComposedForCausalLM, texts: Sequence[Text], batch_size: int) -> list[float]:
    """How unlikely a model finds the prompts themselves."""
    return [-each.logprob for each in score(model, [(prompt[:1], prompt[1:]) for prompt, _ in texts], batch_size)]


@torch.no_grad()
def read_together(
    model: ComposedForCausalLM, rules: Mapping[str, ComposedRule], texts: Sequence[Text], numbers: int
) -> dict[str, Read]:
    """Every rule's over the same members, and every member's own, by their names: members run once per text. `numbers`
    bounds how many log-probabilities are held at once."""
    names = [*rules, *model.members]
    nats: dict[str, list[float]] = {name: [0.0] * len(texts) for name in names}
    for batch in _batches(texts, numbers // (len(model.members) * model.config.vocab_size)):
        rows = [[*texts[number][0], *texts[number][1]] for number in batch]
        ids_BT, mask_BT = left_padded(rows, model)
        logp_MBTV = _member_logprobs(model, ids_BT, mask_BT)
        heard = dict(zip(model.members, logp_MBTV, strict=True))
        for name in names:
            logp_BTV = _composed(rules[name], logp_MBTV, ids_BT, mask_BT) if name in rules else heard[name]
            for number, logp_TV, ids_T in zip(batch, logp_BTV, ids_BT, strict=True):
                count = len(texts[number][1])
                came = logp_TV[-count - 1 : -1].gather(-1, ids_T[-count:, None])
                nats[name][number] = -came.double().sum().item()
    tokens = [len(answer) for _, answer in texts]
    return {name: Read(nats[name], tokens) for name in names}


def _batches(texts: Sequence[Text], most: int) -> Iterator[list[int]]:
    """Numbers of texts that fit together, the longest first."""
    lengths = [len(prompt) + len(answer) for prompt, answer in texts]
    batch: list[int] = []
    for number in sorted(range(len(texts)), key=lambda number: -lengths[number]):
        if batch and (len(batch) + 1) * lengths[batch[0]] > most:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


def _member_logprobs(model: ComposedForCausalLM, ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
    positions_BT = (mask_BT.cumsum(-1) - 1).clamp_min(0)
    call: Any = model
    output = call(
        ids_BT, attention_mask=mask_BT, position_ids=positions_BT, use_cache=False, output_member_logprobs=True
    )
    return output.member_logprobs


def _composed(rule: ComposedRule, logp_MBTV: Tensor, ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """The rule over all rows, some at a time, as the composed model runs it."""
    cache, parts, rows_BT = ComposedCache([], rule), [], mask_BT.bool()
    for start, stop in slices(ids_BT.shape[1], logp_MBTV[:, :, :1].numel()):
        here = slice(start, stop)
        parts.append(cache.compose(logp_MBTV[:, :, here], ids_BT[:, here], rows_BT[:, here]))
    return torch.cat(parts, 1)
