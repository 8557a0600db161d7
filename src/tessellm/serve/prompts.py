"""From what a client sent to token ids: texts, ids, messages through the chat template."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

from ..errors import RoomError, TessellmError
from ..model.room import SLOT, check_room
from ..text.lengths import Lengths
from ..text.structured import Structure, Structures
from ..vocabulary.chats import render_chat
from .refusals import bad
from .schema import ChatRequest, CompletionRequest, Generation, Message
from .turns import Turns

TOO_LONG = "context_length_exceeded"


class Prompts:
    """The tokenizer, used by one thread at a time and never by the event loop's: a long prompt takes a while."""

    def __init__(self, tokenizer: Any, context: int, vocab_size: int, choices: int, ends: Collection[int] = ()):
        self.tokenizer, self.context, self.vocab_size, self.choices = tokenizer, context, vocab_size, choices
        self._structures = Structures(tokenizer, vocab_size, ends)
        self._lengths, self._turns = Lengths(tokenizer, context), Turns()

    def count(self, asked: CompletionRequest | ChatRequest) -> int:
        """How many choices a request asks for: prompts times n."""
        prompts = 1 if isinstance(asked, ChatRequest) else len(as_list(asked.prompt))
        count = prompts * (asked.n or 1)
        if not 1 <= count <= self.choices:
            raise bad(f"expected 1 to {self.choices} choices (prompts times n) in a request; got {count}", "n")
        return count

    async def of_completion(self, asked: CompletionRequest) -> list[list[int]]:
        prompts = as_list(asked.prompt)
        for prompt in prompts:
            self._refuse_long(prompt, "prompt")
        rows = [
            await self._turns.run(len(prompt), partial(self._encode, prompt))
            if isinstance(prompt, str)
            else self._checked_ids(prompt)
            for prompt in prompts
        ]
        for row in rows:
            self._check(row, "prompt")
        return rows

    async def of_chat(self, asked: ChatRequest) -> list[list[int]]:
        if len(asked.messages) >= self.context:
            raise bad(f"expected fewer than {self.context} messages; got {len(asked.messages)}", "messages", TOO_LONG)
        size = sum(len(message.text) for message in asked.messages)
        row = await self._turns.run(size, partial(self._chat, asked.messages))
        self._check(row, "messages")
        return [row]

    async def form_of(self, asked: Generation) -> Structure | None:
        """Return what a request holds its texts to."""
        if not asked.is_structured:
            return None
        try:
            return await self._turns.run(0, partial(self._structures.of, asked.text_schema))
        except TessellmError as error:
            raise bad(str(error), "response_format") from error

    def _refuse_long(self, prompt: str | Sequence[int], param: str) -> None:
        """Before anything is done with it."""
        if isinstance(prompt, str):
            self.check_room(self._lengths.at_least(prompt), 1, param, "at least ")
        else:
            self.check_room(len(prompt), 1, param)

    def _encode(self, text: str) -> list[int]:
        """Of a text that may be too long, which is then told by its beginning."""
        self.check_room(self._lengths.beginning(text), 1, "prompt", "at least ")
        return list(self.tokenizer(text)["input_ids"])

    def _chat(self, messages: Sequence[Message]) -> list[int]:
        if not self.tokenizer.chat_template:
            raise bad("no member has a chat template: use /v1/completions", "messages", "no_chat_template")
        plain = [
            {"role": "system" if message.role == "developer" else message.role, "content": message.text}
            for message in messages
        ]
        try:
            put = render_chat(self.tokenizer, plain)
        except Exception as error:  # a template raises what it likes, mostly about the order of roles
            raise bad(f"the chat template does not take these messages: {error}", "messages") from error
        self._refuse_long(put.text, "messages")
        self.check_room(self._lengths.beginning(put.text), 1, "messages", "at least ")
        return put.encode(self.tokenizer)

    def _checked_ids(self, ids: Sequence[int]) -> list[int]:
        wrong = next((token for token in ids if not 0 <= token < self.vocab_size), None)
        if wrong is not None:
            raise bad(f"expected token ids from 0 to {self.vocab_size - 1}; got {wrong}", "prompt")
        return list(ids)

    def _check(self, row: Sequence[int], param: str) -> None:
        if not row:
            raise bad("the prompt is empty, and the tokenizer adds no beginning-of-text token", param)
        self.check_room(len(row), 1, param)

    def check_room(self, length: int, new: int, param: str, about: str = "") -> None:
        try:
            check_room(length, new, self.context, option="max_tokens", whose=SLOT, about=about)
        except RoomError as error:
            raise bad(str(error), param, TOO_LONG) from error


def as_list(prompt: Any) -> list[Any]:
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [prompt]
    return list(prompt)
