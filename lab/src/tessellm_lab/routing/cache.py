"""Read the features that `features` and `texts` kept, pooled as a form of energy asks for.

Shapes: P prompts, K experts, F features, M pairs of expert and layer, D sizes of a text vector.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tessellm.routing.calibration import TOP
from tessellm.routing.directions import block_of

EMBEDDERS = ("tokens", "sentences")


@dataclass(frozen=True)
class Table:
    """All prompts of some caches; experts are alike in all of them."""

    folders: tuple[Path, ...]
    experts: list[str]
    pairs: list[tuple[int, int | None]]  # expert, block
    part: np.ndarray
    label_P: Tensor  # expert that should answer, −1: the base
    length_P: Tensor  # of the user's message, in tokens
    vectors: dict[str, Tensor]  # by embedder, [P, D]
    descriptions: dict[tuple[str, str], Tensor]  # by embedder and kind, [K, D]

    @classmethod
    def read(cls, folders: Sequence[Path]) -> Table:
        abouts = [json.loads((folder / "about.json").read_text()) for folder in folders]
        texts = [np.load(folder / "texts.npz") for folder in folders]
        experts = abouts[0]["experts"]
        pairs = [(experts.index(name), block_of(path)) for name, path in abouts[0]["pairs"]]
        names = [skill for about in abouts for skill in about["skill"]]
        kinds = [key.split("/")[1] for key in texts[0].files if key.startswith("tokens/") and key != "tokens/prompts"]
        return cls(
            tuple(folders),
            experts,
            pairs,
            np.array([part for about in abouts for part in about["part"]]),
            torch.tensor([experts.index(name) if name in experts else -1 for name in names]),
            torch.tensor([len(ids) for about in abouts for ids in about["ids"]]),
            {key: torch.tensor(np.concatenate([each[f"{key}/prompts"] for each in texts])) for key in EMBEDDERS},
            {(key, kind): torch.tensor(texts[0][f"{key}/{kind}"]) for key in EMBEDDERS for kind in kinds},
        )

    def is_part(self, *parts: str) -> Tensor:
        return torch.tensor(np.isin(self.part, parts))

    def last(self) -> Tensor:
        """Return the shares at the last token, summed over directions, [P, M]."""
        return torch.cat([torch.tensor(shard["last"]).float().sum(-1) for shard in self._shards()])

    def pooled(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """Return for each weighting of pairs, [M], the energies at the last token, as the mean over the user's largest
        quarter, and as the mean over the user's tokens: [P, 3, K]."""
        mixing = [_by_expert(weight_M, self.pairs, len(self.experts)) for weight_M in weights]
        found: list[list[Tensor]] = [[] for _ in weights]
        for shard in self._shards():
            token_TM = torch.tensor(shard["token"]).float()
            spans = shard["spans"].tolist()
            for place, weight_MK in enumerate(mixing):
                rows = (token_TM @ weight_MK).split([kept for kept, _ in spans])
                found[place] += [_pool(row_TK, max(spoken, 1)) for row_TK, (_, spoken) in zip(rows, spans, strict=True)]
        return [torch.stack(each) for each in found]

    def _shards(self) -> Iterator[Any]:
        for folder in self.folders:
            for file in sorted(folder.glob("shard-*.npz")):
                yield np.load(file)


def _pool(row_TK: Tensor, spoken: int) -> Tensor:
    user_TK = row_TK[:spoken]
    return torch.stack([row_TK[-1], user_TK.topk(-(-spoken // TOP), 0).values.mean(0), user_TK.mean(0)])


def _by_expert(weight_M: Tensor, pairs: Sequence[tuple[int, int | None]], experts: int) -> Tensor:
    weight_MK = torch.zeros(len(pairs), experts)
    weight_MK[torch.arange(len(pairs)), torch.tensor([expert for expert, _ in pairs])] = weight_M
    return weight_MK
