"""What marks a chat template's turns, as token ids: behind which tokens an answer begins, and behind which the user
speaks again. Found by putting chats into the template, whatever it is. The rule looks for them in texts
(rules/chat_turns.py). Knows tokenizers, no models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .usual import PROMPTS

ANSWERS = ("Yes", "It is 42.", "echo", "x = 1\n", "so ")  # that end in different ways
SPACED = ("", "\n\nHi", "  Hi", "Hi\n", "Hi\n\n", "Hi  ")  # spaces may be one token with those of the template


def in_chat(tokenizer: Any, prompts: Sequence[str] = PROMPTS) -> list[list[int]]:
    """The usual prompts as token ids, in the chat template; none where there is no template."""
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        return []
    return rendered(tokenizer, [[{"role": "user", "content": prompt}] for prompt in prompts])


def before_answer(tokenizer: Any, prompts: list[list[int]]) -> list[int]:
    """The token ids behind which an answer begins, whatever spaces a prompt ends with; if they are nothing but spaces,
    those behind usual prompts."""
    return _common_end([*prompts, *in_chat(tokenizer, SPACED)]) or _common_end(prompts)


def before_user(tokenizer: Any) -> tuple[list[int], int]:
    """The token ids between an answer and what the user says then, whatever the two are, and how many of the last of
    them become others where that begins with spaces; none where the template has no second turn, or but spaces between
    turns, which are within what is said, too."""
    usual, always = (_between_turns(tokenizer, prompts) for prompts in (PROMPTS[1:9], (*PROMPTS[1:9], *SPACED)))
    if not always or tokenizer.decode(always).isspace():
        return [], 0
    return (usual, len(usual) - len(always)) if usual[: len(always)] == always else (always, 0)


def _between_turns(tokenizer: Any, prompts: Sequence[str]) -> list[int]:
    begun = []
    for answer in ANSWERS:
        chats = [
            [
                {"role": "user", "content": PROMPTS[0]},
                {"role": "assistant", "content": answer},
                {"role": "user", "content": prompt},
            ]
            for prompt in prompts
        ]
        begun.append(common_beginning(rendered(tokenizer, chats)))
    return _common_end(begun)


def rendered(tokenizer: Any, chats: list[Any]) -> list[list[int]]:
    """Chats as token ids; none where the template does not take them."""
    try:
        texts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    except Exception:  # a template raises what it likes, where it wants other roles, say
        return []
    return [tokenizer(text, add_special_tokens=False).input_ids for text in texts]


def common_beginning(rows: Sequence[Sequence[int]]) -> list[int]:
    found: list[int] = []
    for column in zip(*rows, strict=False):
        if len(set(column)) > 1:
            break
        found.append(column[0])
    return found


def _common_end(rows: Sequence[Sequence[int]]) -> list[int]:
    return common_beginning([row[::-1] for row in rows])[::-1]
