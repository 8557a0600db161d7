"""Prompts and texts as token ids."""

from types import SimpleNamespace
from typing import Any

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from tessellm.text.chat import Chat
from tessellm.text.prompts import encode_examples, encode_prompt

TEMPLATE = "{% for m in messages %}{{ m.content }}|{% endfor %}{{ '\n' }}"


def merging() -> Any:
    """A composition's stand-in whose tokenizer makes one token of a newline and the space behind it."""
    vocabulary = {token: number for number, token in enumerate([*"abc|\n ", "\n "])}
    core = Tokenizer(models.BPE(vocabulary, [("\n", " ")]))
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, chat_template=TEMPLATE)
    return SimpleNamespace(
        tokenizer=tokenizer, config=SimpleNamespace(max_position_embeddings=None, check_room=lambda *given: None)
    )


def test_an_answer_that_begins_with_a_space_leaves_the_template_whole() -> None:
    model = merging()
    assert encode_prompt(model, "a\n b", "it") == [0, 6, 1]  # as one text they merge
    ((row, start),) = encode_examples(model, [("ab", " c")], Chat())
    assert row[:start] == encode_prompt(model, "ab", "it", Chat()) == [0, 1, 3, 4]
    assert row[start:] == [5, 2]
