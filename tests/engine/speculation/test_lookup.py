"""Drafts from the text itself: what followed the longest end that was seen before, the latest time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessellm.engine.requests import Request
from tessellm.engine.sampling import Sampling
from tessellm.engine.speculation import lookup
from tessellm.engine.speculation.draft_length import AcceptanceCount
from tessellm.engine.speculation.lookup import (
    KEEP_CHANGES,
    LONGEST_MATCH,
    MOST_MISSES,
    MOST_PLACES,
    SHORTEST_COPY,
    LookupDrafter,
    LookupText,
)


def slow_search(tokens: list[int], most: int) -> tuple[int, int]:
    """Look at every place, of a pair's at the latest `most`; longest ends first, latest places first."""
    places = range(len(tokens) - 1, 0, -1)
    behind_pair = [place for place in places if place > 1 and tokens[place - 2 : place] == tokens[-2:]][:most]
    for size in range(min(LONGEST_MATCH, len(tokens)), 0, -1):
        for start in behind_pair if size > 1 else places:
            if start >= size and tokens[start - size : start] == tokens[-size:]:
                return size, start
    return 0, 0


def slow_match(tokens: list[int], most: int) -> tuple[int, int, list[int]]:
    """All of the text again, token by token: is it a copy, of what, and what would it write next, in four tokens?"""
    source, misses = -1, 0
    pairs: list[tuple[int, int]] = []  # of source and copy, in order
    again = [True]  # whether changes were made again
    for end in range(len(tokens)):
        if source >= 0:
            believed = dict(pairs[: len(pairs) - misses])
            change = believed.get(tokens[source], tokens[source])
            expected = tokens[end] in (tokens[source], change)
            again += [tokens[end] == change] if change != tokens[source] else []
            pairs, misses = [*pairs, (tokens[source], tokens[end])], 0 if expected else misses + 1
            source = source + 1 if misses <= MOST_MISSES else -1
        if source >= 0 and not misses:
            continue
        size, start = slow_search(tokens[: end + 1], most)
        if size == LONGEST_MATCH or source < 0:
            pairs = pairs[: len(pairs) - misses]
            source, misses = start if size >= SHORTEST_COPY else -1, 0
    size, start = slow_search(tokens, most) if source < 0 else (-1 - misses, source)
    trust = sum((1 if made else -1) * KEEP_CHANGES**age for age, made in enumerate(reversed(again)))
    changes = dict(pairs[: len(pairs) - misses]) if source >= 0 and trust >= 0 else {}
    following = [tokens[start + i % (len(tokens) - start)] for i in range(4)] if tokens else []
    return size, start, [changes.get(token, token) for token in following]


@st.composite
def changed_copies(draw: st.DrawFn) -> list[int]:
    """Tokens, and parts of them again, with some replaced by others, now and then by chance."""
    token = st.integers(0, 5)
    source = draw(st.lists(token, min_size=1, max_size=12))
    changes, tokens = draw(st.dictionaries(token, token, max_size=2)), list(source)
    for start in draw(st.lists(st.integers(0, 8), max_size=3)):
        for each in source[start:]:
            tokens.append(draw(token) if draw(st.integers(0, 9)) == 0 else changes.get(each, each))
    return tokens


@given(
    tokens=st.one_of(st.lists(st.integers(0, 3), max_size=30), changed_copies()),
    cut=st.integers(0, 30),
    most=st.sampled_from([MOST_PLACES, 3, 1]),
)
def test_finds_what_a_search_of_the_whole_text_finds(tokens: list[int], cut: int, most: int) -> None:
    text = LookupText()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lookup, "MOST_PLACES", most)
        text.grow(tokens[:cut])
        text.grow(tokens[cut:])
    size, start, following = slow_match(tokens, most)
    assert text.match() == (size, start)
    assert not tokens or text.follow(start, 4) == following


class Watched(list[int]):
    """Counts how often a token is looked at."""

    looks = 0

    def __getitem__(self, place: Any) -> Any:
        self.looks += 1
        return super().__getitem__(place)


def contrived(count: int, others: Iterator[int]) -> list[int]:
    """A pair of tokens again and again, before it always a new one; so many between that no copy lasts."""
    new, tokens = iter(range(10, count)), list[int]()
    while len(tokens) < count:
        tokens += [1, 2] + [next(new) for _ in range(next(others))]
    return tokens[:count]


@pytest.mark.parametrize("between", [(3,), (1, 3, 2), (4, 3, 5)])
def test_no_token_takes_more_looks_the_longer_the_text_is(between: tuple[int, ...]) -> None:
    text = LookupText()
    text.tokens = watched = Watched()
    most = 0
    for token in contrived(6000, cycle(between)):
        watched.looks = 0
        text.grow([token])
        most = max(most, watched.looks)
    assert most <= 2 * (LONGEST_MATCH - 1) * MOST_PLACES + 8  # two for each that is compared; those of the end itself


def test_a_copy_with_changed_tokens_goes_on_behind_them() -> None:
    text = LookupText()
    text.grow([*range(10, 30), 0, 10, 11, 12])
    assert text.match() == (-1, 3)
    text.grow([99])  # not 13
    assert text.match() == (-2, 4)
    assert text.follow(4, 3) == [14, 15, 16]
    text.grow([14])
    assert text.match() == (-1, 5)
    text.grow([98, 97])
    assert text.match() == (-3, 7)
    text.grow([96])
    assert text.match() == (0, 0)  # no copy any more


def test_a_change_is_made_again_once_the_copy_went_on_behind_it() -> None:
    text = LookupText()
    text.grow([1, 2, 3, 4, 5, 2, 6, 3, 7, 2, 8, 9, 0, 1])
    text.grow([2, 3, 4, 5, 50])
    assert text.follow(text.match()[1], 4) == [6, 3, 7, 2]  # not yet
    text.grow([6, 3, 7])
    assert text.match() == (-1, 9)
    assert text.follow(9, 3) == [50, 8, 9]
    text.grow([50])
    assert text.match() == (-1, 10)  # as expected
    text.grow([8, 9, 0, 1, 2])  # the 2 at the end stays what it was
    assert text.follow(1, 2) == [2, 3]


def test_changes_that_copies_do_not_make_again_are_not_drafted() -> None:
    again, source = AcceptanceCount(1.0, 1.0), list(range(1, 9))
    text, other = LookupText(again), LookupText(again)
    begun = [*source, *source, 0, 1, 2, 30, 4, 5, 6, 7, 8, 1, 2]
    text.grow(begun)
    assert text.follow(text.match()[1], 2) == [30, 4]  # the first time it is hoped for
    text.grow([3, 4, 50, 6, 7, 8, 1, 2, 3, 4, 5])
    assert 2 * again.right < again.judged
    other.grow(begun)
    assert other.follow(other.match()[1], 2) == [3, 4]


def test_copies_from_there_and_goes_on_with_its_own_copy() -> None:
    text = LookupText()
    text.grow([5, 6, 7, 8, 5, 6])
    assert text.match() == (-1, 2)
    assert text.follow(2, 7) == [7, 8, 5, 6, 7, 8, 5]


def test_reads_what_a_request_has_written_since() -> None:
    drafter, request = LookupDrafter(), Request([1, 2, 3], Sampling(max_new_tokens=4))
    assert drafter.kind(request) is None
    assert drafter.first(request) is None
    request.receive([1, 2], [0.0, 0.0], frozenset())
    assert drafter.kind(request) == -1
    assert drafter.first(request) == 3
    request.advance(2)
    assert request.room == 1
    assert drafter.draft(request, 3) == [3]
