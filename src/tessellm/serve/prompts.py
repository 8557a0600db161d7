"""From what a client sent to token ids: texts, ids, messages through the chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
from anyio import to_thread

from .refusals import Refusal, bad
from .schema import ChatRequest, CompletionRequest, Message


class Prompts:
    """The tokenizer, used by one thread at a time and never by the event loop's: a long prompt takes a while."""

    def __init__(self, tokenizer: Any, context: int, vocab_size: int, choices: int):
        self.tokenizer, self.context, self.vocab_size, self.choices = tokenizer, context, vocab_size, choices
        self._one = anyio.CapacityLimiter(1)

    async def of_completion(self, asked: CompletionRequest) -> list[list[int]]:
        prompts = _as_list(asked.prompt)
        self._check_count(len(prompts) * (asked.n or 1))
        rows = [
            await to_thread.run_sync(self._encode, prompt, limiter=self._one)
            if isinstance(prompt, str)
            else self._checked_ids(prompt)
            for prompt in prompts
        ]
        for row in rows:
            self._check(row, "prompt")
        return rows

    async def of_chat(self, asked: ChatRequest) -> list[list[int]]:
        self._check_count(asked.n or 1)
        row = await to_thread.run_sync(self._chat, asked.messages, limiter=self._one)
        self._check(row, "messages")
        return [row]

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text)["input_ids"])

    def _chat(self, messages: Sequence[Message]) -> list[int]:
        if not self.tokenizer.chat_template:
            raise bad("no member has a chat template: use /v1/completions", "messages", "no_chat_template")
        plain = [
            {"role": "system" if message.role == "developer" else message.role, "content": message.text}
            for message in messages
        ]
        try:
            text = self.tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template raises what it likes, mostly about the order of roles
            raise bad(f"the chat template does not take these messages: {error}", "messages") from error
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _checked_ids(self, ids: Sequence[int]) -> list[int]:
        wrong = next((token for token in ids if not 0 <= token < self.vocab_size), None)
        if wrong is not None:
            raise bad(f"expected token ids from 0 to {self.vocab_size - 1}; got {wrong}", "prompt")
        return list(ids)

    def _check_count(self, count: int) -> None:
        if not 1 <= count <= self.choices:
            raise bad(f"expected 1 to {self.choices} choices (prompts times n) in a request; got {count}", "n")

    def _check(self, row: Sequence[int], param: str) -> None:
        if not row:
            raise bad("the prompt is empty, and the tokenizer adds no beginning-of-text token", param)
        if len(row) >= self.context:
            raise self.too_long(len(row), 1, param)

    def too_long(self, prompt: int, new: int, param: str) -> Refusal:
        return bad(
            f"the prompt has {prompt} tokens and up to {new} more were asked for, but there is room for {self.context}",
            param,
            "context_length_exceeded",
        )


def _as_list(prompt: Any) -> list[Any]:
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [prompt]
    return list(prompt)
