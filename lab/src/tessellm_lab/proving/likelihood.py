"""The oldest router: the expert under which a prompt is likeliest. Every expert reads it, so few prompts are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tessellm.evaluate.journal import Journal, key_of

from .decisions import Decision
from .ground import Ground
from .peers import best_of

Log = Callable[[str], None]


def by_likelihood(ground: Ground, rows: Sequence[Sequence[int]], out: Path, log: Log) -> list[Decision]:
    """Choose the likeliest expert, scored by its log-likelihood per token less the base's."""
    kept = Journal(out / "likelihoods.jsonl")
    gains = []
    for number, row in enumerate(rows, 1):
        key = key_of(list(ground.names), list(row))
        if key not in kept:
            models = [ground.base.model, *ground.experts.values()]
            kept.add(key, nats=[_nats(model, row) for model in models])
            log(f"{number} of {len(rows)} prompts read by every expert")
        base, *experts = kept[key]["nats"]
        gains.append([base - each for each in experts])
    return best_of(ground.names, torch.tensor(gains))


@torch.inference_mode()
def _nats(model: Any, row: Sequence[int]) -> float:
    """Return the mean cross-entropy of a prompt's tokens."""
    ids_1T = torch.tensor([list(row)])
    logits: Tensor = model(input_ids=ids_1T, use_cache=False).logits
    return float(torch.nn.functional.cross_entropy(logits[0, :-1].float(), ids_1T[0, 1:]))
