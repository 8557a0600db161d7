"""Definitions 1–4 on texts, for models whose sequences cannot be enumerated: estimates with their uncertainty.

Each check reads the members' next-token laws along given texts. Where they come from is part of the result: on texts
sampled from the composition, means estimate expectations over the prefixes that it reaches, which is what the bounds of
docs/theory.md ask for. Intervals are a bootstrap over texts (tokens of one text are not independent). A maximum over
samples bounds no supremum; instead `unseen` bounds the share of new texts that would exceed it.

    M members   K experts   B texts   T tokens   V vocabulary. Row t is the law of token t+1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tessellm.model import ComposedForCausalLM
from tessellm.model.rows import mask_rows
from tessellm.rules import product_scores
from tessellm.statistics import bootstrap

from .definitions import second_largest

MEASURES = ("nats", "total variation")
BATCH = 16


@dataclass(frozen=True)
class Texts:
    """Token ids [B, T] to read the members on, 0 in `attention_mask` where a text is padded. Laws of tokens `start` …
    T−1 are read: what comes before is a prompt."""

    input_ids: Tensor
    attention_mask: Tensor | None = None
    start: int = 1

    def batches(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        for first in range(0, len(self.input_ids), BATCH):
            mask = self.attention_mask
            yield self.input_ids[first : first + BATCH], None if mask is None else mask[first : first + BATCH]


@dataclass(frozen=True)
class Estimate:
    """A mean over rows with its interval, the largest row and where it stands."""

    mean: float
    low: float
    high: float
    largest: float
    unseen: float  # with the same confidence, at most this share of new texts exceeds `largest`
    texts: int
    unit: str
    confidence: float = 0.95
    witness: Mapping[str, Any] = field(default_factory=dict)


def jointly_factorizable(
    model: ComposedForCausalLM, texts: Texts, measure: str = "total variation", confidence: float = 0.95, seed: int = 0
) -> Estimate:
    """Definition 4: at each row the second largest divergence from the base, which any active sets must leave."""
    value_KBT, mask_BT = divergences(model, texts, measure)
    second_BT, experts_2BT = second_largest(value_KBT)

    def name(text: int, row: int) -> Mapping[str, Any]:
        experts = [model.config.member_names[i] for i in experts_2BT[:, text, row].tolist()]
        return {"experts": tuple(experts[: len(value_KBT)])}

    return estimate(second_BT, mask_BT, measure, confidence, seed, name, texts.start)


def skill_factorizable(
    model: ComposedForCausalLM,
    texts: Texts,
    active_KBT: Tensor,
    measure: str = "total variation",
    confidence: float = 0.95,
    seed: int = 0,
) -> Estimate:
    """Definition 3: the worst idle expert at each row. `active_KBT[i, b, t]`: may expert i act on token t of text b?"""
    value_KBT, mask_BT = divergences(model, texts, measure)
    idle_BT, expert_BT = value_KBT.masked_fill(active_KBT[:, :, texts.start :].bool(), 0.0).max(0)

    def name(text: int, row: int) -> Mapping[str, Any]:
        return {"expert": model.config.member_names[1 + int(expert_BT[text, row])]}

    return estimate(idle_BT, mask_BT, measure, confidence, seed, name, texts.start)


def factorized(
    model: ComposedForCausalLM, texts: Texts, owner_T: Tensor, confidence: float = 0.95, seed: int = 0
) -> dict[str, Estimate]:
    """Definition 1 for positions owned as `owner_T` says (0 the base, i expert i), in total variation.

    `outside`: how far experts are from the base at positions they do not own. `dependence`: how far any member's law
    at a position moves when the tokens of all other blocks are exchanged for those of another text, which independent
    blocks do not notice. Texts must have one length.
    """
    input_ids, start = texts.input_ids, texts.start
    owner_t = owner_T[start:]
    experts = torch.arange(1, len(model.members))
    active_KBT = (owner_T == experts[:, None]).unsqueeze(1).expand(-1, len(input_ids), -1)
    outside = skill_factorizable(model, texts, active_KBT, confidence=confidence, seed=seed)
    order_B = torch.roll(torch.arange(len(input_ids)), 1)
    moved_MBT = torch.zeros(len(model.members), len(input_ids), len(owner_t))
    for owner in owner_t.unique().tolist():
        foreign_T = (owner_T != owner) & (torch.arange(len(owner_T)) >= start)
        others = Texts(torch.where(foreign_T, input_ids[order_B], input_ids), None, start)
        pairs = zip(_rows(model, texts), _rows(model, others), strict=True)
        move_MBT = torch.cat([_total_variation(a, b) for (a, _), (b, _) in pairs], dim=1)
        moved_MBT = torch.where(owner_t == owner, move_MBT, moved_MBT)
    worst_BT, member_BT = moved_MBT.max(0)

    def name(text: int, row: int) -> Mapping[str, Any]:
        return {"member": model.config.member_names[int(member_BT[text, row])]}

    everything = torch.ones_like(worst_BT, dtype=torch.bool)
    moved = estimate(worst_BT, everything, "total variation", confidence, seed, name, start)
    return {"outside": outside, "dependence": moved}


def interference(model: ComposedForCausalLM, texts: Texts, confidence: float = 0.95, seed: int = 0) -> Estimate:
    """|log Z| of Eq. 2 at each row: zero under Definitions 1 and 4."""
    found = [
        (product_scores(logp_MBTV, model.config.weights).logsumexp(-1).abs(), mask_BT)
        for logp_MBTV, mask_BT in _rows(model, texts)
    ]
    values_BT, masks_BT = (torch.cat(parts) for parts in zip(*found, strict=True))
    return estimate(values_BT, masks_BT, "nats", confidence, seed, lambda text, row: {}, texts.start)


@dataclass(frozen=True)
class ProjectiveEstimate:
    """Total variation between two laws of a label, from samples of both: the plug-in value and a sure interval."""

    plug_in: float
    low: float
    high: float
    confidence: float


def projective(ours: Sequence[Any], theirs: Sequence[Any], confidence: float = 0.95) -> ProjectiveEstimate:
    """Definition 2 from samples: labels Π_i(x) of texts of the composition and of texts of expert i.

    The plug-in total variation is too large on average, by at most ½√L(1/√n + 1/√m) for L labels; it departs from its
    mean by at most √(½ log(2/δ) (1/n + 1/m)) with probability 1−δ (McDiarmid).
    """
    labels = sorted(set(ours) | set(theirs), key=repr)
    n, m = len(ours), len(theirs)
    shares = [(sum(x == label for x in ours) / n, sum(x == label for x in theirs) / m) for label in labels]
    found = 0.5 * sum(abs(p - q) for p, q in shares)
    spread = math.sqrt(0.5 * math.log(2 / (1 - confidence)) * (1 / n + 1 / m))
    bias = 0.5 * math.sqrt(len(labels)) * (n**-0.5 + m**-0.5)
    return ProjectiveEstimate(found, max(0.0, found - spread - bias), min(1.0, found + spread), confidence)


def estimate(
    value_BT: Tensor,
    mask_BT: Tensor,
    unit: str,
    confidence: float,
    seed: int,
    name: Callable[[int, int], Mapping[str, Any]],
    start: int = 1,
    resamples: int = 2000,
) -> Estimate:
    """The mean over rows, a percentile bootstrap over texts, and the worst row."""
    texts, steps = value_BT.shape
    value_BT, mask_BT = value_BT.double().masked_fill(~mask_BT, 0.0), mask_BT.double()
    sum_B, count_B = value_BT.sum(1), mask_BT.sum(1)
    low, high = bootstrap(sum_B, count_B, confidence, seed, resamples)
    text, row = divmod(int(value_BT.argmax()), steps)
    return Estimate(
        mean=float(sum_B.sum() / count_B.sum()),
        low=low,
        high=high,
        largest=float(value_BT.max()),
        unseen=1 - (1 - confidence) ** (1 / texts),
        texts=texts,
        unit=unit,
        confidence=confidence,
        witness={"text": text, "position": row + start, **name(text, row)},
    )


@torch.no_grad()
def _rows(model: ComposedForCausalLM, texts: Texts) -> Iterator[tuple[Tensor, Tensor]]:
    """logp_MBTV and mask_BT of the laws of tokens start … T−1, some texts at a time."""
    start, length = texts.start, texts.input_ids.shape[1]
    if not 1 <= start < length:
        raise ValueError(f"expected 1 ≤ start < {length} (the texts' length); got {start}")
    for ids_BT, mask in texts.batches():
        output = model(ids_BT, attention_mask=mask, use_cache=False, output_member_logprobs=True)
        yield output.member_logprobs[:, :, start - 1 : -1], mask_rows(mask, ids_BT)[:, start:]


def divergences(model: ComposedForCausalLM, texts: Texts, measure: str) -> tuple[Tensor, Tensor]:
    """How far each expert is from the base at each row: [K, B, T−start], and which rows count."""
    if measure not in MEASURES:
        raise ValueError(f"unknown measure {measure!r}; known: {', '.join(MEASURES)}")
    values, masks = [], []
    for logp_MBTV, mask_BT in _rows(model, texts):
        base, experts = logp_MBTV[0], logp_MBTV[1:]
        values.append(_sup_log_ratio(experts, base) if measure == "nats" else _total_variation(experts, base))
        masks.append(mask_BT)
    return torch.cat(values, dim=1), torch.cat(masks)


def _total_variation(logp: Tensor, logq: Tensor) -> Tensor:
    return 0.5 * (logp.exp() - logq.exp()).abs().sum(-1)


def _sup_log_ratio(logp: Tensor, logq: Tensor) -> Tensor:
    """sup_v |log p − log q|; a token that neither allows does not count."""
    return (logp - logq).abs().nan_to_num(nan=0.0, posinf=torch.inf).amax(-1)
