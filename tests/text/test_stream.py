"""Text as tokens come: whole characters, no stop text, and in the end what the tokenizer makes of all tokens."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tessellm.text.stream import Streamer, TextStream, token_bytes, token_text

from conftest import character_tokenizer
from tokenizer_cases import byte_level, sentence_pieces

TOKENIZERS = {"bytes": byte_level(), "pieces": sentence_pieces()}
POEM = "the cats 🙂🙃 é ça\n  漢字 the\u0301 👩‍👩‍👧 x"


def written(
    tokenizer: Any, ids: list[int], stops: list[str], prompt: list[int] | None = None
) -> tuple[str, TextStream, list]:
    """What was released piece by piece, and the tokens with it."""
    text, shown, tokens = TextStream(tokenizer, stops, prompt or []), "", []
    for token in ids:
        text.add(token)
        piece, done = text.release()
        shown, tokens = shown + piece, tokens + done
        assert "\ufffd" not in piece or not piece.endswith("\ufffd")
        if text.stopped:
            break
    text.finish()
    piece, done = text.release(all_of_it=True)
    return shown + piece, text, tokens + done


@pytest.mark.parametrize("name", TOKENIZERS)
@given(ids=st.lists(st.integers(0, 259), max_size=24))
@settings(max_examples=200, deadline=None)
def test_pieces_make_up_the_text_of_any_tokens(name: str, ids: list[int]) -> None:
    tokenizer = TOKENIZERS[name]
    shown, text, tokens = written(tokenizer, ids, [])
    assert shown == text.text
    if name == "bytes":
        assert shown == tokenizer.decode(ids)
    assert [token.id for token in tokens] == ids
    assert "".join(shown[token.start : token.end] for token in tokens) == shown


@pytest.mark.parametrize("name", TOKENIZERS)
def test_characters_come_whole(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = list(POEM.encode())
    shown, _, tokens = written(tokenizer, ids, [])
    assert shown == POEM
    assert b"".join(token_bytes(tokenizer, token.id) for token in tokens) == POEM.encode()


def test_a_space_at_the_start_is_kept_after_a_prompt() -> None:
    tokenizer, the, cat = TOKENIZERS["pieces"], 256, 259
    assert written(tokenizer, [the, cat], [])[0] == "thecat"  # as the tokenizer has it, at the start of a text
    assert written(tokenizer, [the, cat], [], prompt=[cat])[0] == " thecat"
    half = list("é".encode())[:1]
    assert written(tokenizer, [cat], [], prompt=[cat, *half])[0] == "cat"


@given(text=st.text("abé🙂", max_size=20), stops=st.lists(st.text("abé🙂", min_size=1, max_size=4), max_size=3))
@settings(max_examples=300, deadline=None)
def test_stop_texts_cut_and_are_held_back(text: str, stops: list[str]) -> None:
    shown, kept, tokens = written(TOKENIZERS["bytes"], list(text.encode()), stops)
    first = min((text.find(stop) for stop in stops if stop in text), default=len(text))
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if not ends or text.find(next(s for s in stops if s in text and text.find(s) + len(s) == min(ends))) == first:
        assert shown == text[:first]  # else the stop text that ended first began later
    assert kept.stopped == bool(ends)
    assert all(stop not in shown for stop in stops)
    assert "".join(shown[token.start : token.end] for token in tokens) == shown


def test_tokens_as_text_and_bytes() -> None:
    tokenizer = TOKENIZERS["bytes"]
    assert token_text(tokenizer, 256) == "\\xf0\\x9f"
    assert token_bytes(tokenizer, 259) == b" the"
    assert token_text(TOKENIZERS["pieces"], 256) == " the"
    assert token_bytes(TOKENIZERS["pieces"], 0xC3) == b"\xc3"
    assert token_bytes(tokenizer, 10_000) == b""


def test_what_may_become_a_stop_text_is_held_back() -> None:
    shown, tokenizer = io.StringIO(), character_tokenizer()
    streamer = Streamer(tokenizer, shown, ("stop", "\n"), [tokenizer.eos_token_id])
    seen = []
    for piece in ("prompt", "abcs", "to", "x st", "op more", " and more"):
        streamer.put(torch.tensor(tokenizer(piece, add_special_tokens=False)["input_ids"]))
        seen.append(shown.getvalue())
    streamer.put(torch.tensor([tokenizer.eos_token_id]))
    streamer.end()
    assert seen == ["", "abc", "abc", "abcstox ", "abcstox ", "abcstox "]
    assert shown.getvalue() == "abcstox \n"
