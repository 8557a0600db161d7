"""Where the last user message is, found in rows of ids alone, whatever the template."""

from __future__ import annotations

from typing import Any

import pytest

from tessellm.routing.template import ChatMarks, render

from conftest import CHAT_TEMPLATE, character_tokenizer

WITH_DEFAULT_SYSTEM = "{% if messages[0]['role'] != 'system' %}s: be kind\n{% endif %}" + CHAT_TEMPLATE
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'user' %}<{{ m.content }}> "
    "{% else %}{{ m.content }}; {% endif %}{% endfor %}"
)
NO_SECOND_TURN = (
    "{% if messages|length > 1 %}{{ raise_exception('one') }}{% endif %}u: {{ messages[0]['content'] }}\na: "
)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


CHATS: dict[str, list[dict[str, str]]] = {
    "one": [user("hi there")],
    "two": [user("hi"), said("yes"), user("more, please")],
    "three": [user("a"), said("b"), user("c"), said("d"), user("last one")],
    "system": [{"role": "system", "content": "be brief"}, user("hello you")],
    "lines": [user("\n  spaced\n\n")],
    "empty": [user("")],
}


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, WITH_DEFAULT_SYSTEM, NO_SYSTEM])
@pytest.mark.parametrize("chat", CHATS)
def test_the_last_user_message_is_found(template: str, chat: str) -> None:
    tokenizer = character_tokenizer(chat_template=template)
    messages = CHATS[chat]
    ids = encoded(tokenizer, messages)
    found = ChatMarks.of(tokenizer).read(ids)
    assert tokenizer.decode(ids[found.user]) == messages[-1]["content"]
    assert found.answer == len(ids)


def test_an_answer_that_has_begun_leaves_the_message_where_it_is() -> None:
    tokenizer = character_tokenizer()
    marks, ids = ChatMarks.of(tokenizer), encoded(tokenizer, CHATS["two"])
    assert marks.read([*ids, *tokenizer("the answer").input_ids]) == marks.read(ids)
    assert marks.read(ids[:-1]).answer is None


def test_a_template_of_one_turn_has_marks() -> None:
    tokenizer = character_tokenizer(chat_template=NO_SECOND_TURN)
    ids = encoded(tokenizer, CHATS["one"])
    found = ChatMarks.of(tokenizer).read(ids)
    assert tokenizer.decode(ids[found.user]) == "hi there"


def test_without_a_template_the_prompt_is_the_message() -> None:
    tokenizer = character_tokenizer(chat_template=None)
    ids = render(tokenizer, "hello")
    assert ids == tokenizer("hello").input_ids
    assert ChatMarks.of(tokenizer).read(ids) == (slice(0, len(ids)), None)
    assert ChatMarks.of(None) == ChatMarks()


def encoded(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False).input_ids
