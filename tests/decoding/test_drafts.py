"""Drafts from the text itself: what followed the longest end that was seen before, the latest time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tessellm
from tessellm.decoding.drafts import LONGEST_MATCH, MOST_MISSES, SHORTEST_COPY, Lookup, Text, room
from tessellm.decoding.engine import Engine
from tessellm.decoding.requests import Request
from tessellm.decoding.sampling import Sampling
from tessellm.decoding.speculation import Speculation

from conftest import build_model, perturbed
from decoding_cases import prompts


def slow_search(tokens: list[int]) -> tuple[int, int]:
    """Look at every place, longest ends first, latest places first."""
    for size in range(min(LONGEST_MATCH, len(tokens)), 0, -1):
        for start in range(len(tokens) - 1, size - 1, -1):
            if tokens[start - size : start] == tokens[-size:]:
                return size, start
    return 0, 0


def slow_match(tokens: list[int]) -> tuple[int, int]:
    """All of the text again, token by token: is it a copy, and of what?"""
    source, misses = -1, 0
    for end in range(len(tokens)):
        if source >= 0:
            misses = 0 if tokens[source] == tokens[end] else misses + 1
            source = source + 1 if misses <= MOST_MISSES else -1
        if source >= 0 and not misses:
            continue
        size, start = slow_search(tokens[: end + 1])
        if size == LONGEST_MATCH or (source < 0 and size >= SHORTEST_COPY):
            source, misses = start, 0
    return slow_search(tokens) if source < 0 else (-1 - misses, source)


@given(tokens=st.lists(st.integers(0, 3), max_size=30), cut=st.integers(0, 30))
def test_finds_what_a_search_of_the_whole_text_finds(tokens: list[int], cut: int) -> None:
    text = Text()
    text.grow(tokens[:cut])
    text.grow(tokens[cut:])
    assert text.match() == slow_match(tokens)


def test_a_copy_with_changed_tokens_goes_on_behind_them() -> None:
    text = Text()
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


def test_copies_from_there_and_goes_on_with_its_own_copy() -> None:
    text = Text()
    text.grow([5, 6, 7, 8, 5, 6])
    assert text.match() == (-1, 2)
    assert text.follow(2, 7) == [7, 8, 5, 6, 7, 8, 5]


def test_reads_what_a_request_has_written_since() -> None:
    lookup, request = Lookup(into=None), Request([1, 2, 3], Sampling(max_new_tokens=4))  # type: ignore[arg-type]
    assert lookup.kind(request) is None
    assert lookup.first(request) is None
    request.asked = 2
    assert lookup.kind(request) is None  # it has not come yet
    request.receive([1, 2], [0.0, 0.0])
    assert lookup.kind(request) == -1
    assert lookup.first(request) == 3
    assert room(request) == 1


@pytest.mark.parametrize("draft", ["lookup", "member:base"])
@pytest.mark.parametrize("adaptive", [True, False])
def test_texts_go_on_while_the_device_reads_prompts(draft: str, adaptive: bool) -> None:
    """As on a GPU, where a first token comes after the pass behind it was begun; some are the last of their texts."""
    base = build_model("llama")
    model = tessellm.compose(base, {"a": perturbed(base, 1, 0.002)}, rule="product")
    texts, asked = [text * 4 for text in prompts(12, 12)], [Sampling(1 + 5 * (n % 4)) for n in range(12)]
    expected = Engine(model, slots=3).generate(texts, asked)
    model.config.eos_token_id = [request.tokens[0] for request in expected[-2:]]
    expected = Engine(model, slots=3).generate(texts, asked)
    engine = Engine(model, slots=3, speculation=Speculation(draft, 3, adaptive))
    engine.steps.lag = 1
    found = engine.generate(texts, asked)
    assert [(r.tokens, r.finish_reason) for r in found] == [(r.tokens, r.finish_reason) for r in expected]
    assert engine.speculator is not None
    assert engine.speculator.accepted > 5
