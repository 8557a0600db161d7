"""A byte-pair tokenizer trained on the texts, and the texts as token ids with the owner of each token.

Words split before a space, digits stand alone, line ends too: no token crosses the end of a prompt or of a piece.

    N texts   T tokens, the longest text's
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .problems import Level
from .texts import READERS, Piece, write_text

END = "</s>"
WORDS = r"\n| +(?= )| ?[A-Za-z_]+| ?[0-9]| ?[^\sA-Za-z_0-9]+| "
NOTHING = -1  # the owner of padding
CHUNK = 2000  # texts that one process makes at a time


class Texts(NamedTuple):
    """Texts of one reader, the shortest first."""

    tokens_NT: Tensor
    owner_NT: Tensor
    length_N: list[int]


def make_tokenizer(level: Level, vocabulary: int, texts: int, seed: int = 0) -> Any:
    """Trained on what the base reads, and what the experts do: everyone's texts have the same words."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

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


def _texts_of(tokenizer: Any, level: Level, reader: str, count: int, seed: str) -> list[tuple[list[int], list[int]]]:
    rng = random.Random(seed)
    return [encode(tokenizer, write_text(rng, level, reader)) for _ in range(count)]


def _part(given: tuple[str, Level, str, int, str]) -> list[tuple[list[int], list[int]]]:
    """In a process of its own: the tokenizer travels as its file's text."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    content, *rest = given
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(content), eos_token=END, pad_token=END)
    return _texts_of(tokenizer, *rest)


def pool(tokenizer: Any, level: Level, reader: str, count: int, seed: int, processes: int = 1) -> Texts:
    """So many texts for a reader; the same however many processes make them."""
    sizes = [min(CHUNK, count - first) for first in range(0, count, CHUNK)]
    seeds = [f"{reader}/{seed}/{number}" for number in range(len(sizes))]
    if processes == 1:
        parts = [_texts_of(tokenizer, level, reader, *each) for each in zip(sizes, seeds, strict=True)]
    else:
        from concurrent.futures import ProcessPoolExecutor
        from multiprocessing import get_context

        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        content = tokenizer.backend_tokenizer.to_str()
        given = [(content, level, reader, *each) for each in zip(sizes, seeds, strict=True)]
        with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as workers:
            parts = list(workers.map(_part, given))
    rows = sorted((row for part in parts for row in part), key=lambda row: len(row[0]))
    longest = len(rows[-1][0])
    tokens_NT = torch.full((len(rows), longest), tokenizer.pad_token_id, dtype=torch.int16)
    owner_NT = torch.full((len(rows), longest), NOTHING, dtype=torch.int8)
    for number, (ids, owners) in enumerate(rows):
        tokens_NT[number, : len(ids)] = torch.tensor(ids)
        owner_NT[number, : len(ids)] = torch.tensor(owners)
    return Texts(tokens_NT, owner_NT, [len(ids) for ids, _ in rows])
