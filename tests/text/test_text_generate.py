"""Prompts are read once, and the request is made to fit them where it may be."""

from pathlib import Path
from typing import Any

import pytest

from tessellm.errors import PromptError, RoomError
from tessellm.text.generate import generate_texts
from tessellm.text.options import TextOptions
from tessellm.text.prompts import encode, encode_prompts


class Counting:
    """A tokenizer that notes every text it is given."""

    def __init__(self, tokenizer: Any):
        self.tokenizer, self.read = tokenizer, []

    def __call__(self, text: str, **options: Any) -> Any:
        self.read.append(text)
        return self.tokenizer(text, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)


@pytest.mark.parametrize("engine", ["auto", "reference"])
def test_a_request_that_fits_itself_reads_each_prompt_once(
    composed: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    model = composed[0]
    counting = Counting(model.tokenizer)
    monkeypatch.setattr(model, "tokenizer", counting)
    prompts = ["a" * 100, "b" * (model.config.max_position_embeddings - 5)]
    written = list(generate_texts(model, prompts, TextOptions(fit=True), engine=engine))
    assert counting.read == prompts
    assert max(each.tokens for each in written) <= 5


def test_fewer_tokens_only_where_there_is_no_room_and_only_if_wished(composed: tuple[Any, Path]) -> None:
    model = composed[0]
    limit = model.config.max_position_embeddings
    for length, new in ((4, 60), (limit - 20, 20), (limit - 1, 1)):
        assert encode_prompts(model, ["a" * length], TextOptions(60, fit=True))[1].max_new_tokens == new
    told = " and up to 60 more were asked for", f", but there is room for {limit} with what follows"
    for length, fit, why in ((limit - 20, False, told[0]), (limit, True, told[1])):
        with pytest.raises(PromptError, match=f"has {length} tokens{why}"):
            encode_prompts(model, ["a" * length], TextOptions(60, fit=fit))


@pytest.mark.parametrize("text", ["a" * 20_000_000, "a b\n" * 5_000_000])
def test_what_is_far_too_long_is_told_by_its_beginning(
    composed: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    model = composed[0]
    counting = Counting(model.tokenizer)
    monkeypatch.setattr(model, "tokenizer", counting)
    with pytest.raises(RoomError, match=r"prompt 2 has at least 1024 tokens, but there is room for 128"):
        encode_prompts(model, ["a", text], TextOptions())
    assert max(map(len, counting.read)) == 16 * 128


def test_a_long_text_of_few_tokens_is_read(composed: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a normaliser joins spaces: characters alone do not say how many tokens there are."""
    model = composed[0]
    tokenizer = model.tokenizer
    monkeypatch.setattr(model, "tokenizer", lambda text, **options: tokenizer(" ".join(text.split()), **options))
    assert len(encode(model, "a" + " " * 100_000 + "b", "the text")) == len(tokenizer("a b")["input_ids"])
