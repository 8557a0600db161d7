"""Other ways to compose the same members, and what each does to the texts of a diagnosis: measured, never guessed.

Of texts that were given, every other rule combines what the members said when they were read; where that was not kept,
all members read once more. Texts that the composition wrote are written anew under each change, and judged by the
score. Knows nothing of what to advise.

Shapes: M members, B texts of a batch, T time, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import fmean

import torch
from torch import Tensor

from ..model import ComposedForCausalLM
from ..model.rows import slices
from ..model.variants import with_rule
from ..rules import RULES, ComposedRule, normalised
from ..text.options import TextOptions
from ..text.reference import left_padded
from .interference import rows_of
from .kept import KeptRows
from .prompts import Example
from .rates import percent
from .reading import batches, traced
from .score import chance_per_token
from .trace import Trace

MOST_WRITTEN = 4  # changes under which texts are written anew
MOST_LEFT_OUT = 3  # experts without which the composition is tried
LEAST_NATS, LEAST_CHANCE = 0.02, 0.01  # per token: less is noise


@dataclass(frozen=True)
class Change:
    """What to do, in words, and what it is made of; `kind` is rule, weights or without."""

    kind: str
    action: str
    rule: str | None = None
    weights: tuple[float, ...] | None = None
    without: str | None = None


@dataclass(frozen=True)
class Effect:
    """What a change does to each text: to its log-likelihood per token where it was given, else to the chance, per
    token, that what is written is right."""

    change: Change
    before: tuple[float, ...]
    after: tuple[float, ...]
    given: bool
    numbers: tuple[int, ...]  # of the texts, counted from 0

    @property
    def least(self) -> float:
        return LEAST_NATS if self.given else LEAST_CHANCE

    @property
    def gain(self) -> float:
        return fmean(self.after) - fmean(self.before)

    @property
    def gains(self) -> list[float]:
        return [after - before for before, after in zip(self.before, self.after, strict=True)]

    @property
    def helps(self) -> bool:
        """Better in the mean, and not by a few texts alone."""
        better, worse = self.moved
        return self.gain > self.least and better >= worse

    @property
    def moved(self) -> tuple[int, int]:
        """Count the texts that are better, and those that are worse."""
        return sum(gain > self.least for gain in self.gains), sum(gain < -self.least for gain in self.gains)

    def __str__(self) -> str:
        """Say what is won and what is lost."""
        better, worse = self.moved
        change = f"{self._step(fmean(self.before), fmean(self.after))}, better on {better} of {len(self.after)} texts"
        if not worse:
            return f"{change}, worse on none"
        most = min(range(len(self.after)), key=self.gains.__getitem__)
        where = f"prompt {self.numbers[most] + 1}: {self._step(self.before[most], self.after[most])}"
        return f"{change}, worse on {worse} (most on {where})"

    @property
    def short(self) -> str:
        return f"{self.change.action}: {self.number(fmean(self.after))}"

    @property
    def unit(self) -> str:
        return "log-likelihood per token" if self.given else "predicted right per token"

    def _step(self, before: float, after: float) -> str:
        return f"{self.number(before)} → {self.number(after)}"

    def number(self, value: float) -> str:
        """Write a value of this kind."""
        return f"{value:.2f}".replace("-", "−") if self.given else percent(value)


def other_ways(model: ComposedForCausalLM, doubtful: Sequence[str]) -> list[Change]:
    """List what could be done instead, the likeliest to help first: other rules, without one of the experts in doubt,
    equal weights."""
    own, experts, weights = str(model.rule.name), model.config.member_names[1:], model.config.weights
    rules = [Change("rule", f"use rule: {name}", rule=name) for name in RULES if name != own]
    without, equal, count = [], [], len(experts)
    for name in doubtful[:MOST_LEFT_OUT] if count > 1 else ():
        left = tuple(0.0 if expert == name else weight for expert, weight in zip(experts, weights, strict=True))
        if left != weights:
            without.append(Change("without", f"leave out {name}", weights=left, without=name))
    same = (1 / count,) * count
    if count > 1 and weights != same:
        equal.append(Change("weights", f"give every expert the weight 1/{count}", weights=same))
    if count > 1 and own != "product":
        equal.append(Change("rule", f"use rule: product with the weights 1/{count}", rule="product", weights=same))
    return [*rules, *without[:1], *equal, *without[1:]]


def measure(
    model: ComposedForCausalLM,
    examples: Sequence[Example],
    traces: Sequence[Trace],
    changes: Sequence[Change],
    options: TextOptions,
    batch_size: int,
    kept: KeptRows,
) -> list[Effect]:
    """Measure changes on the texts that were given, or, where there are none, on those written anew."""
    if not changes:
        return []
    if kept.batches:
        numbered = zip(range(len(examples)), examples, traces, strict=True)
        given = [(number, trace) for number, example, trace in numbered if example.text is not None]
        sizes = [len(part) for part in batches(examples, batch_size) if part[0].text is not None]
        return _read(model, given, changes, list(zip(sizes, kept.batches, strict=True)))
    before = tuple(chance_per_token(rows_of(traces)).tolist())
    found = []
    for change in changes[:MOST_WRITTEN]:
        other = with_rule(model, change.rule or str(model.rule.name), change.weights)
        written = [each for part in batches(examples, batch_size) for each in traced(other, part, options)]
        after = tuple(chance_per_token(rows_of(written)).tolist())
        found.append(Effect(change, before, after, False, tuple(range(len(examples)))))
    return found


def _read(
    model: ComposedForCausalLM,
    numbered: Sequence[tuple[int, Trace]],
    changes: Sequence[Change],
    kept: Sequence[tuple[int, Sequence[Tensor]]],
) -> list[Effect]:
    """Measure changes on texts, in the batches in which they were read: per batch its size and what was kept of it."""
    rules = [_rule(model, change) for change in changes]
    before = tuple(float(trace["logprob"][0, :, -1][trace.scored[0]].mean()) for _, trace in numbered)
    rest = iter(trace for _, trace in numbered)
    parts = [likelihoods(model, list(islice(rest, size)), rules, blocks) for size, blocks in kept]
    after_CB = torch.cat(parts, 1)
    numbers = tuple(number for number, _ in numbered)
    return [
        Effect(change, before, tuple(after_B), True, numbers)
        for change, after_B in zip(changes, after_CB.tolist(), strict=True)
    ]


def _rule(model: ComposedForCausalLM, change: Change) -> ComposedRule:
    weights = model.config.weights if change.weights is None else change.weights
    rule = None if change.rule is None else model.config.meant(change.rule)
    return model.rule.with_(rule, weights)


@torch.inference_mode()
def likelihoods(
    model: ComposedForCausalLM, traces: Sequence[Trace], rules: Sequence[ComposedRule], kept: Sequence[Tensor] = ()
) -> Tensor:
    """Compute the mean log-probability of the scored tokens of each text under every rule: [rules, B]. `kept` are the
    members' log-probabilities, if they are at hand; else all members read the texts."""
    ids_BT, mask_BT = left_padded([trace.tokens[0].tolist() for trace in traces], model)
    scored_BT, _ = left_padded([trace.scored[0].long().tolist() for trace in traces], model)
    scored_BT = scored_BT * mask_BT
    start, states = 0, [None for _ in rules]
    total_CB = torch.zeros(len(rules), len(traces), dtype=torch.float64)
    for logp_MBTV in kept or _read_again(model, ids_BT, mask_BT):
        stop = start + logp_MBTV.shape[2]
        next_BT1, counted_BT = ids_BT[:, start + 1 : stop + 1, None], scored_BT[:, start + 1 : stop + 1].bool()
        for number, rule in enumerate(rules):
            if not rule.stateful:  # it needs none but the rows that are asked about
                total_CB[number] += _without_state(rule, logp_MBTV, next_BT1[..., 0], counted_BT)
                continue
            fed = ids_BT[:, start:stop], mask_BT[:, start:stop].bool()
            logp_BTV, states[number] = rule(logp_MBTV, *fed, states[number])
            logp_BT = logp_BTV.gather(-1, next_BT1)[..., 0].double().masked_fill(~counted_BT, 0.0)
            total_CB[number] += logp_BT.sum(1).cpu()
        start = stop
    return total_CB / scored_BT.sum(1).cpu()


def _read_again(model: ComposedForCausalLM, ids_BT: Tensor, mask_BT: Tensor) -> Iterator[Tensor]:
    """Let all members read texts, and yield what they say of all tokens but the first, block by block."""
    position_BT, caches = (mask_BT.cumsum(1) - 1).clamp_min(0), model.new_cache().caches
    for start, stop in slices(ids_BT.shape[1] - 1, len(model.members) * len(ids_BT) * model.config.vocab_size):
        inputs = {"attention_mask": mask_BT[:, :stop], "position_ids": position_BT[:, start:stop]}
        yield normalised(
            [
                model.member_logits(name, ids_BT[:, start:stop], cache, 0, inputs)
                for name, cache in zip(model.members, caches, strict=True)
            ]
        )


def _without_state(rule: ComposedRule, logp_MBTV: Tensor, next_BT: Tensor, counted_BT: Tensor) -> Tensor:
    """Sum the log-probabilities of the tokens that count under a rule that remembers nothing: [B]."""
    logp_MRV, next_R = logp_MBTV[:, counted_BT], next_BT[counted_BT]
    logp_RV = rule(logp_MRV[:, None], next_R[None], torch.ones_like(next_R[None], dtype=torch.bool), None)[0][0]
    found_BT = torch.zeros(counted_BT.shape, dtype=torch.float64, device=counted_BT.device)
    found_BT[counted_BT] = logp_RV.gather(-1, next_R[:, None])[:, 0].double()
    return found_BT.sum(1).cpu()
