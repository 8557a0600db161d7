"""A byte-pair tokenizer trained on the texts, and the texts as token ids with the owner of each token.

Words split before a space, digits stand alone, line ends too: no token crosses the end of a prompt or of a piece.

    N texts   T tokens, the longest text's
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..common.workers import by_processes
from .problems import Level
from .texts import READERS, Piece, write_text

END = "</s>"
WORDS = r"\n| +(?= )| ?[A-Za-z_]+| ?[0-9]| ?[^\sA-Za-z_0-9]+| "
NOTHING = -1  # the owner of padding
CHUNK = 2000  # texts that one process makes at a time
Part = tuple[np.ndarray, np.ndarray, np.ndarray]  # tokens and owners of some texts, end to end; the texts' lengths


class Texts(NamedTuple):
    """Texts of one reader, the shortest first."""

    tokens_NT: Tensor
    owner_NT: Tensor
    length_N: list[int]


def make_tokenizer(level: Level, vocabulary: int, texts: int, seed: int = 0) -> Any:
    """Trained on what the base reads, and what the experts do: everyone's texts have the same words."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(WORDS), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    core.decoder = decoders.ByteLevel()
    rng = random.Random(f"tokenizer/{seed}")
    written = ("".join(text for text, _ in write_text(rng, level, rng.choice(READERS))) for _ in range(texts))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(written, trainer)
    return _dressed(core)


def _dressed(core: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END, pad_token=END)


def encode(tokenizer: Any, pieces: Sequence[Piece]) -> tuple[list[int], list[int]]:
    """Token ids and owners, with an end token that belongs to the last piece."""
    ids: list[int] = []
    owners: list[int] = []
    for text, owner in pieces:
        own = tokenizer.backend_tokenizer.encode(text).ids
        ids += own
        owners += [owner] * len(own)
    return [*ids, tokenizer.eos_token_id], [*owners, pieces[-1][1]]


def library(tokenizer: Any, level: Level, count: int, seed: int = 0, processes: int = 1) -> dict[str, Texts]:
    """So many texts for every reader; the same however many processes make them."""
    sizes = [min(CHUNK, count - first) for first in range(0, count, CHUNK)]
    content = tokenizer.backend_tokenizer.to_str()
    given = [
        (content, level, reader, size, f"{reader}/{seed}/{number}")
        for reader in READERS
        for number, size in enumerate(sizes)
    ]
    if processes > 1:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    parts = list(by_processes(_part, given, processes))
    each = len(sizes)
    return {reader: _joined(parts[n * each : (n + 1) * each]) for n, reader in enumerate(READERS)}


def _part(content: str, level: Level, reader: str, count: int, seed: str) -> Part:
    """Some texts, in any process: the tokenizer travels as its file's text."""
    from tokenizers import Tokenizer

    tokenizer, rng = _dressed(Tokenizer.from_str(content)), random.Random(seed)
    ids: list[int] = []
    owners: list[int] = []
    lengths = []
    for _ in range(count):
        tokens, own = encode(tokenizer, write_text(rng, level, reader))
        ids += tokens
        owners += own
        lengths.append(len(tokens))
    return np.array(ids, np.int16), np.array(owners, np.int8), np.array(lengths)


def _joined(parts: Sequence[Part]) -> Texts:
    """Rows of one width, the shortest text first."""
    ids, owners, lengths = (torch.from_numpy(np.concatenate(each)) for each in zip(*parts, strict=True))
    there_NT = torch.arange(int(lengths.max())) < lengths[:, None]
    tokens_NT = torch.zeros(there_NT.shape, dtype=torch.int16).masked_scatter_(there_NT, ids)
    owner_NT = torch.full(there_NT.shape, NOTHING, dtype=torch.int8).masked_scatter_(there_NT, owners)
    order = lengths.argsort(stable=True)
    return Texts(tokens_NT[order], owner_NT[order], lengths[order].tolist())
