"""Prompts as token ids: tokenized, put into the chat template, checked for length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..errors import PromptError
from ..model import ComposedForCausalLM
from ..model.room import check_room
from .lengths import tokens_of_beginning
from .options import TextOptions


def tokenizer_of(model: ComposedForCausalLM) -> Any:
    if model.tokenizer is None:
        raise PromptError("no member came with a tokenizer, so text cannot be read. Save one into the base's folder")
    return model.tokenizer


def encode(model: ComposedForCausalLM, text: str, what: str, special: bool = True) -> list[int]:
    """Tokenise a text. One that is far too long is refused by its beginning: tokenising megabytes takes minutes."""
    tokenizer, limit = tokenizer_of(model), model.config.max_position_embeddings
    if limit:
        check_room(tokens_of_beginning(tokenizer, limit, text), 0, limit, what, about="at least ")
    return tokenizer(text, add_special_tokens=special)["input_ids"]


def encode_examples(model: ComposedForCausalLM, examples: Sequence[tuple[str, str]]) -> list[tuple[list[int], int]]:
    """Tokenise prompts with their texts, none longer than the members' context, and how many are the prompt's."""
    encoded = []
    for number, (prompt, text) in enumerate(examples, 1):
        row = encode(model, prompt + text, f"text {number}")
        model.config.check_room(len(row), 0, f"text {number}")
        encoded.append((row, len(encode(model, prompt, f"text {number}")) if prompt else 0))
    return encoded


def encode_prompts(
    model: ComposedForCausalLM, prompts: Sequence[str], options: TextOptions
) -> tuple[list[list[int]], TextOptions]:
    """Tokenise prompts; return their ids and the options, with fewer new tokens where they have to fit."""
    if "" in options.stop:
        raise PromptError("a stop text must not be empty: every text holds it")
    tokenizer, limit = tokenizer_of(model), model.config.max_position_embeddings
    texts = [as_chat(tokenizer, prompt) if options.chat else prompt for prompt in prompts]
    rows = [encode(model, text, f"prompt {number}", not options.chat) for number, text in enumerate(texts, 1)]
    if options.fit and limit:
        room = limit - max(map(len, rows), default=0)
        options = replace(options, max_new_tokens=max(1, min(options.max_new_tokens, room)))
    for number, row in enumerate(rows, 1):
        check_row(model, row, options.max_new_tokens, f"prompt {number}", "--max-new-tokens")
    return rows, options


def check_row(
    model: ComposedForCausalLM, row: Sequence[int], new: int, what: str = "the prompt", option: str = "max_new_tokens"
) -> None:
    """Refuse a row of token ids that nothing can follow."""
    if not row:
        raise PromptError(f"{what} is empty, and the tokenizer adds no beginning-of-text token")
    model.config.check_room(len(row), new, what, option)


def as_chat(tokenizer: Any, prompt: str) -> str:
    if not tokenizer.chat_template:
        raise PromptError("no member has a chat template; leave out --chat")
    try:
        return tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # a template raises what it likes
        raise PromptError(f"the chat template cannot be used: {error}. Mend it, or leave out --chat") from error
