"""Lower bounds of how many tokens a text has, without tokenising all of it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tessellm.text.lengths import Lengths, longest_token

from conftest import character_tokenizer
from tokenizer_cases import byte_level, sentence_pieces

TOKENIZERS = {"bytes": byte_level(), "characters": character_tokenizer(), "pieces": sentence_pieces()}


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=st.text(alphabet=st.characters(codec="utf-8"), max_size=200) | st.text("the cat <unk>", max_size=200))
@settings(max_examples=200, deadline=None)
def test_bounds_are_lower_bounds(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    tokens = len(tokenizer(text)["input_ids"])
    assert Lengths(tokenizer, 1).at_least(text) <= tokens
    assert Lengths(tokenizer, 1).beginning(text) <= tokens


def changed(**parts: Any) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with other parts."""
    core = Tokenizer.from_str(TOKENIZERS["bytes"].backend_tokenizer.to_str())
    for name, part in parts.items():
        setattr(core, name, part)
    return PreTrainedTokenizerFast(tokenizer_object=core)


def test_where_a_token_may_cover_any_text_there_is_no_bound_by_bytes() -> None:
    assert longest_token(TOKENIZERS["bytes"]) is not None
    assert longest_token(TOKENIZERS["characters"]) == len("<unk>")
    stripping = changed()
    stripping.add_tokens([AddedToken("<x>", lstrip=True)])
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>")))
    spaces = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()])
    for tokenizer in (changed(normalizer=normalizers.NFC()), stripping, words, changed(pre_tokenizer=spaces)):
        assert longest_token(tokenizer) is None
        assert Lengths(tokenizer, 1).at_least("a" * 10_000) == 0
    assert longest_token(object()) is None
