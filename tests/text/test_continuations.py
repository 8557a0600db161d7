"""Stop texts end a request at the token that completes them, whatever tokens are made of."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tessellm
from tessellm.decoding.requests import Request
from tessellm.decoding.sampling import Sampling
from tessellm.decoding.speculation import Speculation
from tessellm.text.continuations import by_engine, engine_for
from tessellm.text.requests import Request as Asked
from tessellm.text.stops import stop_at_text

from conftest import build_model, character_tokenizer
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
    engine: Any = SimpleNamespace(cancel=lambda request: request.finish("cancelled"))
    request = Request([1], Sampling(1000))
    for new in arrivals:
        request.tokens += new
        stop_at_text(engine, request, tokenizer, stops)
        if request.done:
            break
    return request.tokens, request.done


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


def test_drafts_bring_no_tokens_behind_a_stop_text() -> None:
    """Also where the last tokens of a text come together, and the stop text is among them."""
    base, row = build_model("llama"), list(range(10, 20))
    model, tokenizer = tessellm.compose(base, {"same": build_model("llama")}), TOKENIZERS["characters"]
    (written,) = by_engine(engine_for(model, [row], Asked(8)), tokenizer, [row], Asked(8), None)
    asked, drafts = Asked(8, stop=(tokenizer.decode(written[2:4]),)), Speculation("member:base", adaptive=False)
    engine = engine_for(model, [row], asked, speculation=drafts)
    assert list(by_engine(engine, tokenizer, [row], asked, None)) == [written[:4]]
    assert engine.speculator is not None
    assert engine.speculator.accepted == 6
