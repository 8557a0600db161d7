"""Chats as token ids, by a tokenizer's chat template. Messages cannot fake turns, and templates cannot run for ever.

A tokenizer reads `<|im_end|>` in a message as the token that ends a turn. So the special tokens of the vocabulary that
a message spells are replaced by marks before the template runs, and what the marks stand for is encoded as plain text.
A chat without such texts is encoded as `apply_chat_template` does it.
"""

from __future__ import annotations

import re
import secrets
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ..errors import PromptError

SECONDS = 3.0  # that a template may run for one chat
LARGEST = 1 << 20  # characters that a template may add to a chat
TIMES = 4  # that it may repeat the messages
PROBE = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"})

Turn = Mapping[str, str]  # role, content


@dataclass(frozen=True)
class RenderedChat:
    """A chat in its template. Odd parts are texts of messages that spell special tokens."""

    parts: tuple[str, ...]

    @property
    def text(self) -> str:
        return "".join(self.parts)

    def encode(self, tokenizer: Any) -> list[int]:
        """Return the token ids; only the template's own special tokens are special."""
        ids: list[int] = []
        for number, part in enumerate(self.parts):
            for text in (part[:1], part[1:]) if number % 2 else (part,):
                ids += tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
        return ids


def render_chat(tokenizer: Any, turns: Sequence[Turn], generation_prompt: bool = True) -> RenderedChat:
    """Put a chat into the tokenizer's template, up to where the next answer begins. Raises what the template raises."""
    special, own = _marking_texts(tokenizer, tokenizer.get_chat_template())
    nonce, spelt = f"\ue000{secrets.randbits(64)}.", list[str]()

    def mark(found: re.Match[str]) -> str:
        spelt.append(found[0])
        return f"{nonce}{len(spelt) - 1}\ue001"

    marked = []
    for turn in turns:
        guarded = special if turn["role"] == "assistant" else special + own
        pattern = "|".join(map(re.escape, sorted(guarded, key=len, reverse=True)))
        marked.append({**turn, "content": re.sub(pattern, mark, turn["content"]) if guarded else turn["content"]})
    text = _run_template(tokenizer, marked, generation_prompt)
    parts = re.split(f"{re.escape(nonce)}([0-9]+)\ue001", text)
    return RenderedChat(tuple(spelt[int(part)] if number % 2 else part for number, part in enumerate(parts)))


def encode_chat(tokenizer: Any, turns: Sequence[Turn], generation_prompt: bool = True) -> list[int]:
    """Return a chat's token ids."""
    return render_chat(tokenizer, turns, generation_prompt).encode(tokenizer)


@lru_cache(maxsize=16)
def _marking_texts(tokenizer: Any, template: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the texts of special tokens, and of other added tokens that the template writes around turns. Those of
    one character cannot be spelt any other way."""
    added = {str(token): token.special for token in tokenizer.added_tokens_decoder.values() if len(str(token)) > 1}
    try:
        written = _run_template(tokenizer, PROBE, True)
    except Exception:  # a template raises what it likes
        written = ""
    special = tuple(text for text, is_special in added.items() if is_special)
    return special, tuple(text for text, is_special in added.items() if not is_special and text in written)


def _run_template(tokenizer: Any, turns: Sequence[Turn], generation_prompt: bool) -> str:
    """Render as `apply_chat_template` does, within bounds."""
    from transformers.utils.chat_template_utils import _compile_jinja_template  # later: it brings tessellm.model

    template = _compile_jinja_template(tokenizer.get_chat_template())
    largest = LARGEST + TIMES * sum(len(turn["content"]) for turn in turns)
    pieces, size = list[str](), 0
    with _time_limit(SECONDS):
        for piece in template.generate(
            messages=[dict(turn) for turn in turns], tools=None, documents=None,
            add_generation_prompt=generation_prompt, **tokenizer.special_tokens_map,
        ):  # fmt: skip
            pieces.append(piece)
            size += len(piece)
            if size > largest:
                raise PromptError(f"the chat template writes more than {largest:,} characters; it has no end, perhaps")
    return "".join(pieces)


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Stop Python code that is called inside when the time is over, in whichever thread; for code that is not ours."""
    end, before = time.monotonic() + seconds, sys.gettrace()

    def watch(*_: Any) -> Any:
        if time.monotonic() > end:
            raise PromptError(f"the chat template ran for more than {seconds:g} seconds; it has no end, perhaps")
        return watch

    sys.settrace(watch)
    try:
        yield
    finally:
        sys.settrace(before)
