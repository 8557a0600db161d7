"""Drafts from the text itself: what followed the longest end that was seen before, the latest time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tessellm.decoding.drafts import LONGEST_MATCH, Lookup, Text, room
from tessellm.decoding.requests import Request
from tessellm.decoding.sampling import Sampling


def slow_match(tokens: list[int]) -> tuple[int, int]:
    """Look at every place, longest ends first, latest places first."""
    for size in range(min(LONGEST_MATCH, len(tokens)), 0, -1):
        for start in range(len(tokens) - 1, size - 1, -1):
            if tokens[start - size : start] == tokens[-size:]:
                return size, start
    return 0, 0


@given(tokens=st.lists(st.integers(0, 3), max_size=30), cut=st.integers(0, 30))
def test_finds_what_a_search_of_the_whole_text_finds(tokens: list[int], cut: int) -> None:
    text = Text()
    text.grow(tokens[:cut])
    text.grow(tokens[cut:])
    assert text.match() == slow_match(tokens)


def test_copies_from_there_and_goes_on_with_its_own_copy() -> None:
    text = Text()
    text.grow([5, 6, 7, 8, 5, 6])
    assert text.match() == (2, 2)
    assert text.follow(2, 7) == [7, 8, 5, 6, 7, 8, 5]


def test_reads_what_a_request_has_written_since() -> None:
    lookup, request = Lookup(into=None), Request([1, 2, 3], Sampling(max_new_tokens=4))  # type: ignore[arg-type]
    assert lookup.kind(request) is None
    assert lookup.first(request) is None
    request.receive(1, 0.0)
    request.receive(2, 0.0)
    assert lookup.kind(request) == 2
    assert lookup.first(request) == 3
    request.asked = 2
    assert room(request) == 1
