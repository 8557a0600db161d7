"""Tokenizers of every kind, two of them at a time."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tessellm.errors import TessellmError, VocabularyError
from tessellm.vocabulary import MemberTokens, Vocabulary, agree

WORDS = ["<s>", "</s>", "<unk>", "cat", "dog", "sat", "ran", "mat"]
ENDS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
NO_TEMPLATE = "No member has a chat template."
MERGES = [("a", "b"), ("b", "c")]


def words(ids: dict[str, int] | list[str] = WORDS, **special: str) -> PreTrainedTokenizerFast:
    """A word-level tokenizer with these ids, or with the words in order."""
    vocab = ids if isinstance(ids, dict) else {word: i for i, word in enumerate(ids)}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, **{**ENDS, **special})


def byte_level(order: str = "", merges: list[tuple[str, str]] = MERGES) -> PreTrainedTokenizerFast:
    """Byte-level BPE; the letters of `order` take the first ids."""
    alphabet = list(order) + sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(order))
    pieces = [*alphabet, "ab", "bc", "<|endoftext|>"]
    core = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|endoftext|>")


def unigram(pieces: list[str]) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.Unigram([(p, -float(len(pieces) - len(p))) for p in pieces], unk_id=0))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")


def two(
    base: object,
    math: object,
    sizes: tuple[int, int] = (8, 8),
    ends: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
) -> Vocabulary:
    return agree([MemberTokens("base", sizes[0], base, ends[0]), MemberTokens("math", sizes[1], math, ends[1])])


def refusal(base: object, math: object, sizes: tuple[int, int] = (8, 8)) -> str:
    with pytest.raises(VocabularyError) as caught:
        two(base, math, sizes)
    assert isinstance(caught.value, TessellmError)
    return str(caught.value)


def meaning(vocabulary: Vocabulary, members: list[MemberTokens]) -> list[dict[int, str]]:
    """What each member takes every composed id to be: the real tokens only."""
    read = []
    for s in members:
        text = {i: t for t, i in s.tokens.items()}
        own = vocabulary.alignments[s.name].to_member(torch.arange(vocabulary.size)).tolist()
        read.append({v: text[i] for v, i in enumerate(own) if i in text})
    return read


class Bare:
    """A tokenizer reduced to its map, so that hypothesis can try many."""

    bos_token = eos_token = pad_token = unk_token = chat_template = None

    def __init__(self, ids: list[int]) -> None:
        self.ids = {f"t{n}": i for n, i in enumerate(ids)}

    def get_vocab(self) -> dict[str, int]:
        return dict(self.ids)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return " ".join(tokens)
