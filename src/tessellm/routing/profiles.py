"""What a router keeps of each expert: directions, and what it measured on the calibration prompts."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .text import Embedder


@dataclass(frozen=True)
class ExpertToRoute:
    """An expert as a router is built from it."""

    model: nn.Module
    description: str | None = None
    examples: tuple[str, ...] = ()


@dataclass(frozen=True)
class ExpertProfile:
    """What a router keeps of an expert."""

    directions: Mapping[str, Tensor]
    features_PF: Tensor  # on the calibration prompts
    similarity_PS: Tensor
    vectors: Mapping[str, Tensor]  # of the description, by embedder
    description: str | None = None
    examples: tuple[str, ...] = ()


def described(description: str | None, embedders: Mapping[str, Embedder], tokenizer: Any) -> dict[str, Tensor]:
    """Return the vector of a description by each embedder, [1, D]; none without a description."""
    if not description:
        return {}
    row = tokenizer(description, add_special_tokens=False).input_ids
    return {key: embedder.embed([row]) for key, embedder in embedders.items()}


def similarity(prompts: Mapping[str, Tensor], vectors: Mapping[str, Tensor]) -> Tensor:
    """Return the similarity of prompts to a description by each embedder, [P, S]; 0 without a description."""
    none = torch.zeros(len(next(iter(prompts.values()))))
    return torch.stack([found @ vectors[key][0] if key in vectors else none for key, found in prompts.items()], -1)


def fingerprint(prompts: Sequence[str], table: Tensor) -> str:
    text = (
        "\0".join(prompts) + str(tuple(table.shape)) + str(table[:: max(len(table) // 16, 1)].float().sum(-1).tolist())
    )
    return hashlib.sha256(text.encode()).hexdigest()


def under(tensors: Mapping[str, Tensor], start: str) -> dict[str, Tensor]:
    return {key.removeprefix(start): tensor for key, tensor in tensors.items() if key.startswith(start)}


def unchanged(profiles: Mapping[str, ExpertProfile], found: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the features of experts that have the directions of an earlier profile of theirs."""
    kept = {}
    for name, own in found.items():
        earlier = profiles[name].directions if name in profiles else {}
        if (
            name in profiles
            and own.keys() == earlier.keys()
            and all(torch.equal(rows, earlier[path]) for path, rows in own.items())
        ):
            kept[name] = profiles[name].features_PF
    return kept
