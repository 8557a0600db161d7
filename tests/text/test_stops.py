"""Stop texts end a request at the token that completes them, whatever tokens are made of."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessellm.text.stops import StopFinder
from tessellm.text.stream import TextStream

from conftest import character_tokenizer
from tokenizer_cases import byte_level, sentence_pieces

TOKENIZERS = {"bytes": byte_level(), "pieces": sentence_pieces(), "characters": character_tokenizer()}
TOKENIZERS["tidied"] = byte_level()
TOKENIZERS["tidied"].clean_up_tokenization_spaces = True
TOKENIZERS["tidied"].clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
STOPS = ["\n\n", "the ", " a", "é", "🙂", "s", " ", "n", "th'", "x\n", "\ufffd", "end", "\u0301"]
TEXTS = ["the cat\n\n", " a", "é", "🙂", "🙃", "n't", " 've ", " ' ", "the\u0301", "end", "x\n", "s", "do n't "]


def obvious(tokenizer: Any, arrivals: list[list[int]], stops: list[str]) -> tuple[list[int], bool]:
    """All of the text, read after every arrival."""

    def stopped(tokens: list[int]) -> bool:
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        return any(stop in text for stop in stops)

    tokens: list[int] = []
    for new in arrivals:
        tokens += new
        if stopped(tokens):
            while stopped(tokens[:-1]):
                tokens.pop()
            return tokens, True
    return tokens, False


def searched(tokenizer: Any, arrivals: list[list[int]], stops: list[str]) -> tuple[list[int], bool]:
    finder, tokens = StopFinder(tokenizer, stops), []
    for new in arrivals:
        tokens += new
        if (kept := finder.kept(tokens)) is not None:
            return tokens[:kept], True
    return tokens, False


@st.composite
def tokens(draw: Any, tokenizer: Any) -> list[list[int]]:
    """Random tokens and texts cut into tokens, byte by byte or not, arriving some at a time."""
    pieces = st.lists(st.integers(0, len(tokenizer) - 1), max_size=6) | st.sampled_from(TEXTS).map(
        lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]
    )
    row = list(chain.from_iterable(draw(st.lists(pieces, max_size=12))))
    cuts = draw(st.sets(st.integers(1, max(1, len(row) - 1))))
    return [row[start:stop] for start, stop in pairwise([0, *sorted(cuts), len(row)])]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_requests_end_where_reading_everything_every_time_would_end_them(name: str, data: Any) -> None:
    arrivals = data.draw(tokens(TOKENIZERS[name]))
    stops = data.draw(st.lists(st.sampled_from(STOPS), min_size=1, max_size=3))
    assert searched(TOKENIZERS[name], arrivals, stops) == obvious(TOKENIZERS[name], arrivals, stops)


@pytest.mark.parametrize(
    ("name", "ids", "stop"),
    [
        ("bytes", b"the end", "end"),
        ("bytes", "x é".encode(), " é"),
        ("pieces", "🙂".encode(), "🙂"),
        ("pieces", [256, 258], "the "),  # "▁the", "▁a"
        ("tidied", b"I do n't", "on'"),
        ("tidied", b"a ' b ' c", "a'b'c"),
    ],
)
def test_a_stop_text_is_found_with_the_token_that_completes_it(name: str, ids: Sequence[int], stop: str) -> None:
    arrivals = [[token] for token in ids]
    assert searched(TOKENIZERS[name], arrivals, [stop]) == (list(ids), True)
    assert obvious(TOKENIZERS[name], arrivals, [stop]) == (list(ids), True)


def test_text_is_read_only_where_a_stop_text_can_end(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, read = character_tokenizer(), []
    decode = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids, **how: read.append(len(ids)) or decode(ids, **how))
    row = tokenizer("what is 2+2? " * 20 + "answer: 4", add_special_tokens=False)["input_ids"]
    assert searched(tokenizer, [[token] for token in row], ["\n\n", "!", "2 + 2 = 4"]) == (row, False)
    assert max(read) == 2  # each kind of token once
    assert len(read) == len(set(row))


@pytest.mark.parametrize("name", ["bytes", "pieces"])
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_behind_a_prompt_it_finds_what_a_stream_shows(name: str, data: Any) -> None:
    """The server ends requests by the one and cuts texts by the other."""
    tokenizer = TOKENIZERS[name]
    stops = data.draw(st.lists(st.sampled_from([stop for stop in STOPS if stop != "\ufffd"]), min_size=1, max_size=3))
    text = "".join(data.draw(st.lists(st.sampled_from(TEXTS), max_size=6)))
    prompt, ids = ([*tokenizer(each, add_special_tokens=False)["input_ids"]] for each in ("x the", text))
    finder, stream = StopFinder(tokenizer, stops, prompt), TextStream(tokenizer, stops, prompt)
    for count, token in enumerate(ids, 1):
        stream.add(token)
        assert finder.kept(ids[:count]) == (count if stream.stopped else None)
        if stream.stopped:
            break
