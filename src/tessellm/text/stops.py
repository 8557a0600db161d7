"""Texts that end a text: where they begin, and which new tokens may hold one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache, reduce
from operator import or_
from typing import Any

import torch
from transformers import StoppingCriteria

from ..decoding.engine import Engine
from ..decoding.requests import Request as EngineRequest

UNFINISHED = "\ufffd"  # what a decoder makes of half a character
NEW_TOKENS = 80  # more never arrive at once


def stop_at_text(engine: Engine, arrived: EngineRequest, tokenizer: Any, stops: Sequence[str]) -> None:
    """End a request whose text holds a stop text, and forget the tokens that came after it."""
    new, arrived.searched = len(arrived.tokens) - arrived.searched, len(arrived.tokens)
    if not _letters(tokenizer, tuple(stops)).may_end(arrived.tokens, new):
        return

    def stopped(tokens: list[int]) -> bool:
        return stop_position(tokenizer.decode(tokens, skip_special_tokens=True), stops) is not None

    end = max(len(stop.encode()) for stop in stops) + NEW_TOKENS  # a token is a byte or more: what came before was read
    if stopped(arrived.tokens[-end:]) and stopped(arrived.tokens):
        engine.cancel(arrived)
        while stopped(arrived.tokens[:-1]):
            arrived.tokens.pop()


class _Letters(dict[int, int]):
    """The characters of stop texts that a token brings, a bit each. One that is a part of a character, or nothing by
    itself, may bring any. Read twice in a row: decoders drop a space at the beginning of a text."""

    def __init__(self, tokenizer: Any, stops: Sequence[str]):
        self.tokenizer, self.bits = tokenizer, {letter: 1 << n for n, letter in enumerate(sorted(set("".join(stops))))}
        self.needed = [self._sum(stop) for stop in stops]
        self.reach = max(len(stop.encode()) for stop in stops)  # a token is a byte or more
        if getattr(tokenizer, "clean_up_tokenization_spaces", False):
            self.reach = 3 * self.reach + 2  # "do n't" is read as "don't", "a ' b" as "a'b"

    def __missing__(self, token: int) -> int:
        text = self.tokenizer.decode([token] * 2, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        self[token] = self._sum(text) if text and UNFINISHED not in text else self._sum(self.bits)
        return self[token]

    def _sum(self, text: Iterable[str]) -> int:
        return reduce(or_, (self.bits.get(letter, 0) for letter in text))

    def may_end(self, tokens: Sequence[int], new: int) -> bool:
        """Whether a stop text can have come to its end with one of the new tokens, the last ones."""
        brought = reduce(or_, map(self.__getitem__, tokens[1 - self.reach - new :]), 0)
        return any(needed & brought == needed for needed in self.needed)


_letters = lru_cache(maxsize=8)(_Letters)


def stop_position(text: str, stops: Sequence[str]) -> int | None:
    """Where the first stop text begins."""
    return min((text.find(stop) for stop in stops if stop in text), default=None)


def held_back(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end may be the beginning of a stop text."""
    starts = (stop[:size] for stop in stops for size in range(1, len(stop)))
    return max((len(start) for start in starts if text.endswith(start)), default=0)


class StopTexts(StoppingCriteria):
    """Rows end when a stop text stands in what they wrote. It reads the text itself, so it works for every tokenizer:
    the library's own criterion reads the vocabulary, and fails where a normaliser changes the case."""

    def __init__(self, tokenizer: Any, stops: Sequence[str], prompt_length: int):
        self.tokenizer, self.stops, self.prompt_length = tokenizer, stops, prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        texts = self.tokenizer.batch_decode(input_ids[:, self.prompt_length :], skip_special_tokens=True)
        found = [any(stop in text for stop in self.stops) for text in texts]
        return torch.tensor(found, device=input_ids.device)
