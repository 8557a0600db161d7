"""What a router keeps of each expert: directions, and what it measured on the calibration prompts."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .text import Embedder, similarities


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
    vectors: Mapping[str, Tensor]  # of the description and the examples, by embedder
    description: str | None = None
    examples: tuple[str, ...] = ()


def text_profile(
    expert: ExpertToRoute, embedders: Mapping[str, Embedder], prompts: Mapping[str, Tensor], tokenizer: Any
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the vectors of an expert's description and examples, and its similarities on calibration prompts."""
    vectors = {}
    for key, embedder in embedders.items():
        for kind, texts in (
            ("description", [expert.description] if expert.description else []),
            ("examples", expert.examples),
        ):
            rows = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
            width = prompts[key].shape[1]
            vectors[f"{key}/{kind}"] = embedder.embed(rows) if rows else torch.zeros(0, width)
    return vectors, text_similarity(prompts, vectors)


def text_similarity(prompts: Mapping[str, Tensor], vectors: Mapping[str, Tensor]) -> Tensor:
    """Return the similarities of prompts to an expert's texts, [P, S], one embedder after the other."""
    parts = [
        similarities(found, vectors[f"{key}/description"], vectors[f"{key}/examples"]) for key, found in prompts.items()
    ]
    return torch.cat(parts, -1)


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
