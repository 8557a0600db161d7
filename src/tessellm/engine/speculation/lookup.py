"""Drafts from the text itself: what followed the last time that the text ended as it does now, or what comes next in
the passage that it is copying. A draft is a guess; verification decides. Every text says what kind of draft it has, so
that the acceptance rate is learnt per kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from ..requests import Request
from .draft_length import AcceptanceCount

LONGEST_MATCH = 4  # tokens at the end of the text that are looked for
SHORTEST_COPY = 2  # a match of this many tokens is taken for the beginning of a copy
MOST_MISSES = 2  # tokens in a row that a copy may change
KEEP_CHANGES = 0.9  # weight of earlier changes, made again or not, after each later one
MOST_PLACES = 64  # latest places of a pair of tokens that are compared: more would make some texts' time quadratic


class LookupText:
    """A text that grows, with an index of where each token and pair of tokens last had a successor, and the place that
    the text is copying from. A copy that changes a token goes on behind that token, which no run of tokens would find,
    and is expected to make the same change again (names that are replaced, letters that are exchanged), as long as
    copies mostly do: `repeated` counts how often they did, over all texts that share it."""

    def __init__(self, repeated: AcceptanceCount | None = None) -> None:
        self.repeated = repeated or AcceptanceCount(1.0, 1.0)
        self.tokens: list[int] = []
        self._after: dict[int, int] = {}  # token → the last place behind it
        self._after_pair: dict[tuple[int, int], int] = {}
        self._before: list[int] = []  # place behind a pair → the earlier such place; −1: none
        self._match = (0, 0)  # tokens of the text's end that occur earlier, and the place behind them there
        self._source: int | None = None  # the place that comes next, if the text goes on copying
        self._misses = 0  # tokens in a row that differ from the copied passage
        self._changes: dict[int, int] = {}  # token of a copied passage → what the copy wrote in its place last time
        self._unsure: list[tuple[int, int]] = []  # changes among the last tokens: kept if the copy goes on behind them

    def grow(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._note_end()
            self._copy(token)
            self.tokens.append(token)
            if self._source is None or self._misses:
                self._match = size, start = self._longest_match()
                if (size >= SHORTEST_COPY and self._source is None) or size == LONGEST_MATCH:
                    self._source, self._misses, self._unsure = start, 0, []

    def _note_end(self) -> None:
        """Index the text's end, which has a successor now."""
        end, before = len(self.tokens), -1
        if end:
            self._after[self.tokens[-1]] = end
        if end > 1:
            pair = self.tokens[-2], self.tokens[-1]
            before, self._after_pair[pair] = self._after_pair.get(pair, -1), end
        self._before.append(before)

    def _copy(self, token: int) -> None:
        if self._source is None:
            return
        source = self.tokens[self._source]
        change = self._changes.get(source, source)
        if change != source:
            self.repeated.add(token == change, 1, KEEP_CHANGES)
        if token in (source, change):
            self._changes.update([*self._unsure, (source, token)])
            self._misses, self._unsure = 0, []
        else:
            self._misses += 1
            self._unsure.append((source, token))
        self._source = self._source + 1 if self._misses <= MOST_MISSES else None

    def _longest_match(self) -> tuple[int, int]:
        """Find the longest end of the text that occurs earlier, at its latest place."""
        tokens, best = self.tokens, (0, 0)
        place = self._after_pair.get((tokens[-2], tokens[-1]), -1) if len(tokens) > 1 else -1
        if place < 0:
            return (1, self._after[tokens[-1]]) if tokens[-1] in self._after else best
        for _ in range(MOST_PLACES):
            size = 2
            while size < min(place, LONGEST_MATCH) and tokens[place - size - 1] == tokens[-size - 1]:
                size += 1
            if size > best[0]:
                best = size, place
            place = self._before[place]
            if size == LONGEST_MATCH or place < 0:
                break
        return best

    def match(self) -> tuple[int, int]:
        """Name the kind of draft that there is, and the place where it begins. 0: none; −1, −2, …: the passage being
        copied, after none, one, … changed tokens; else the number of tokens that match."""
        return self._match if self._source is None else (-1 - self._misses, self._source)

    def follow(self, start: int, length: int) -> list[int]:
        """Take the tokens from a place on, changed as the copy changes them; past the text's end it repeats itself."""
        period = len(self.tokens) - start
        tokens = self.tokens[start : start + length]
        if length > period:
            tokens = [tokens[i % period] for i in range(length)]
        if self._source is None or 2 * self.repeated.right < self.repeated.judged:
            return tokens
        return [self._changes.get(token, token) for token in tokens]


class LookupDrafter:
    """Drafts from the request's own prompt and what it has written."""

    def __init__(self) -> None:
        self._repeated = AcceptanceCount(1.0, 1.0)
        self._texts: WeakKeyDictionary[Request, LookupText] = WeakKeyDictionary()

    def text(self, request: Request) -> LookupText:
        """Bring the request's text up to date."""
        text = self._texts.get(request)
        if text is None:
            text = self._texts[request] = LookupText(self._repeated)
            text.grow(request.prompt)
        text.grow(request.tokens[len(text.tokens) - len(request.prompt) :])
        return text

    def kind(self, request: Request) -> int | None:
        """Name the kind of draft that there is; None: there is none."""
        return self.text(request).match()[0] or None

    def draft(self, request: Request, length: int) -> list[int]:
        """Return a draft of up to `length` tokens, and no more than the request has room for."""
        text = self.text(request)
        size, start = text.match()
        return text.follow(start, min(length, max(0, request.room))) if size else []

    def first(self, request: Request) -> int | None:
        """Return the first token of a draft."""
        text = self.text(request)
        size, start = text.match()
        return text.follow(start, 1)[0] if size else None
