"""Calibration: what energies and similarities are on prompts that concern no expert.

Scores are z-scores against them, so that a strong expert is not preferred; thresholds are their quantiles, so that the
base keeps ordinary prompts."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

from .energy import Energies
from .template import ChatMarks

FILE = "calibration_prompts.jsonl"
BATCH_TOKENS = 2048
TOP = 4  # one of so many of the user's tokens counts: those with the largest energies
LEAST_STD = 1e-8
FEATURES = 2  # of an expert: at the last token of the prompt, and of the user's tokens

Progress = Callable[[int, int], None]


def calibration_prompts() -> list[str]:
    """Return the prompts that the library brings."""
    lines = (files(__package__) / FILE).read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines]


def pool(energy_TK: Tensor, user: slice) -> Tensor:
    """Return a prompt's energies as features, [F, K]: the value at the last token, and the mean over the
    largest quarter of the user's tokens. An empty user span counts as the last token alone."""
    spoken_TK = energy_TK[user] if len(energy_TK[user]) else energy_TK[-1:]
    largest_TK = spoken_TK.topk(-(-len(spoken_TK) // TOP), 0).values
    return torch.stack([energy_TK[-1], largest_TK.mean(0)]).float()


@torch.no_grad()
def measure(base: Any, tap: Energies, rows: Sequence[Sequence[int]], marks: ChatMarks, progress: Progress) -> Tensor:
    """Return the features of these prompts, [P, F, K]. Runs the base: batches of like length, padded on the right,
    which causal layers do not see; what all prompts begin with is read once."""
    found: list[Tensor | None] = [None] * len(rows)
    device = base.get_input_embeddings().weight.device
    shared = _shared_prefix(rows, marks)
    cache = None
    if shared:
        prefix = torch.tensor([rows[0][:shared]], device=device)
        cache = base.base_model(input_ids=prefix, use_cache=True).past_key_values
        if not hasattr(cache, "batch_repeat_interleave"):
            cache, shared = None, 0
        tap.take()
    done = 0
    for batch in batches(rows):
        longest = max(len(rows[place]) for place in batch)
        padded = [[*rows[place][shared:], *[0] * (longest - len(rows[place]))] for place in batch]
        own: Any = copy.deepcopy(cache)
        if own is not None:
            own.batch_repeat_interleave(len(batch))
        ids = torch.tensor(padded, device=device)
        base.base_model(input_ids=ids, past_key_values=own, use_cache=own is not None)
        for place, energy_TK in zip(batch, tap.take(), strict=True):
            user = marks.read(rows[place]).user
            here = slice(max(user.start - shared, 0), max(user.stop - shared, 0))
            found[place] = pool(energy_TK[: len(rows[place]) - shared], here)
        done += len(batch)
        progress(done, len(rows))
    return torch.stack([each for each in found if each is not None])


def _shared_prefix(rows: Sequence[Sequence[int]], marks: ChatMarks) -> int:
    """Return how many of the template's first tokens all rows share; at least one token stays to be read."""
    prefix = list(marks.prefix)
    same = bool(prefix) and all(list(row[: len(prefix)]) == prefix and len(row) > len(prefix) for row in rows)
    return len(prefix) if same else 0


def batches(rows: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Return the places of rows that are read together: of about one length, BATCH_TOKENS at most."""
    order = sorted(range(len(rows)), key=lambda place: len(rows[place]))
    batch: list[int] = []
    for place in order:
        if batch and (len(batch) + 1) * len(rows[place]) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch


@dataclass(frozen=True)
class Scale:
    """Means and deviations on calibration prompts, by feature."""

    mean: Tensor
    std: Tensor

    @classmethod
    def of(cls, values: Tensor) -> Scale:
        return cls(values.mean(0), values.std(0, correction=0).clamp_min(LEAST_STD))

    def z(self, values: Tensor) -> Tensor:
        return (values - self.mean) / self.std


@dataclass(frozen=True)
class EnergyScale:
    """From features to one z-score per expert: z per feature, their sum, z."""

    features: Scale
    total: Scale

    @classmethod
    def of(cls, features_PFK: Tensor) -> EnergyScale:
        features = Scale.of(features_PFK)
        return cls(features, Scale.of(features.z(features_PFK).sum(1)))

    def z(self, features_PFK: Tensor) -> Tensor:
        return self.total.z(self.features.z(features_PFK).sum(1))
