"""Texts that end a text: which token completes one, where one begins, and what may become one.

Of every tokenizer: a stop text is looked for in the text itself, not in the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache, reduce
from operator import or_
from typing import Any

import torch
from transformers import StoppingCriteria

UNFINISHED = "\ufffd"  # what a decoder makes of half a character
NEW_TOKENS = 80  # more never arrive at once
TAIL = 6  # tokens of the prompt that the first new ones are decoded with


class StopFinder:
    """Looks for stop texts in one text while its tokens come. The text is that of the new tokens by themselves or, if
    the prompt is given, as they stand behind it: decoders drop a space at the beginning of a text."""

    def __init__(self, tokenizer: Any, stops: Sequence[str], prompt: Sequence[int] = ()):
        self.tokenizer, self.stops, self.searched = tokenizer, stops, 0
        self.letters = _letters(tokenizer, tuple(stops))
        self.before = prompt_tail(tokenizer, prompt)
        self.window = max(len(stop.encode()) for stop in stops) + NEW_TOKENS  # a token is a byte or more

    def kept(self, tokens: Sequence[int]) -> int | None:
        """Count the tokens up to the one that completes a stop text; None: there is no stop text."""
        new, self.searched = len(tokens) - self.searched, len(tokens)
        if not self.letters.may_end(tokens, new):
            return None
        start = max(0, len(tokens) - self.window)  # what came before was searched
        if not (self._stopped(tokens[start:]) and (start == 0 or self._stopped(tokens))):
            return None
        kept = len(tokens)
        while self._stopped(tokens[: kept - 1]):
            kept -= 1
        return kept

    def _stopped(self, tokens: Sequence[int]) -> bool:
        before = len(self._decode(self.before)) if self.before else 0
        return stop_position(self._decode([*self.before, *tokens])[before:], self.stops) is not None

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)


def stop_finder(tokenizer: Any, stops: Sequence[str], prompt: Sequence[int] = ()) -> StopFinder | None:
    return StopFinder(tokenizer, stops, prompt) if stops else None


def prompt_tail(tokenizer: Any, prompt: Sequence[int]) -> list[int]:
    """Return the end of the prompt, for new tokens to be decoded with; nothing, if it ends in half a character."""
    tail = list(prompt[-TAIL:])
    return tail if tail and not tokenizer.decode(tail, skip_special_tokens=True).endswith(UNFINISHED) else []


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
    """Find where the first stop text begins; None: there is none."""
    return min((text.find(stop) for stop in stops if stop in text), default=None)


def held_back(text: str, stops: Sequence[str]) -> int:
    """Count the characters at the end that may begin a stop text."""
    starts = (stop[:size] for stop in stops for size in range(1, len(stop)))
    return max((len(start) for start in starts if text.endswith(start)), default=0)


class StopTexts(StoppingCriteria):
    """Ends rows of Hugging Face's `generate`. The library's own criterion reads the vocabulary, and fails where a
    normaliser changes the case."""

    def __init__(self, tokenizer: Any, stops: Sequence[str], prompt_length: int):
        self.tokenizer, self.stops, self.prompt_length = tokenizer, stops, prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        texts = self.tokenizer.batch_decode(input_ids[:, self.prompt_length :], skip_special_tokens=True)
        found = [stop_position(text, self.stops) is not None for text in texts]
        return torch.tensor(found, device=input_ids.device)
