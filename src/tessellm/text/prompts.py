"""Prompts as token ids: tokenized, put into the chat template, checked for length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..errors import PromptError
from ..model import ComposedForCausalLM
from ..model.room import check_room
from ..rules import Mixture
from .chat import Chat
from .lengths import tokens_of_beginning
from .options import TextOptions


def tokenizer_of(model: ComposedForCausalLM) -> Any:
    if model.tokenizer is None:
        raise PromptError("no member came with a tokenizer, so text cannot be read. Save one into the base's folder")
    return model.tokenizer


def expects_chat(model: ComposedForCausalLM, prompts: Sequence[str]) -> bool:
    """Whether prompts should go through the chat template: the rule `mixture` routes where the template begins an
    answer, none of them is empty, and in none is a token of the template's own."""
    tokenizer = tokenizer_of(model)
    if model.rule.name != Mixture.name or not tokenizer.chat_template or not all(prompts):
        return False
    return not any(token in prompt for prompt in prompts for token in tokenizer.all_special_tokens)


def encode(model: ComposedForCausalLM, text: str, what: str, special: bool = True) -> list[int]:
    """Tokenise a text."""
    check_length(model, text, what)
    return tokenizer_of(model)(text, add_special_tokens=special)["input_ids"]


def check_length(model: ComposedForCausalLM, text: str, what: str) -> None:
    """Refuse a text that is far too long by its beginning: tokenising megabytes takes minutes."""
    if limit := model.config.max_position_embeddings:
        check_room(tokens_of_beginning(tokenizer_of(model), limit, text), 0, limit, what, about="at least ")


def encode_prompt(
    model: ComposedForCausalLM, prompt: str, what: str, chat: Chat | None = None, text: str = ""
) -> list[int]:
    """Tokenise a prompt, as it is or as a turn of a chat, and the text that follows it. An answer in a chat has tokens
    of its own: one that begins with spaces must not run into the template's last newline."""
    if chat is None:
        return encode(model, prompt + text, what)
    put = chat.put(tokenizer_of(model), prompt)
    check_length(model, put.text, what)
    return [*put.encode(tokenizer_of(model)), *encode(model, text, what, special=False)]


def encode_examples(
    model: ComposedForCausalLM, examples: Sequence[tuple[str, str]], chat: Chat | None = None
) -> list[tuple[list[int], int]]:
    """Tokenise prompts with their texts, none longer than the members' context, and how many are the prompt's."""
    encoded = []
    for number, (prompt, text) in enumerate(examples, 1):
        what = f"text {number}"
        if chat is not None and not prompt:
            raise PromptError(f"{what} has no prompt, which --chat and --system put into the chat template. Give one")
        row = encode_prompt(model, prompt, what, chat, text)
        model.config.check_room(len(row), 0, what)
        encoded.append((row, len(encode_prompt(model, prompt, what, chat)) if prompt else 0))
    return encoded


def encode_prompts(
    model: ComposedForCausalLM, prompts: Sequence[str], options: TextOptions
) -> tuple[list[list[int]], TextOptions]:
    """Tokenise prompts; return their ids and the options, with fewer new tokens where they have to fit."""
    if "" in options.stop:
        raise PromptError("a stop text must not be empty: every text holds it")
    rows = [encode_prompt(model, prompt, f"prompt {number}", options.chat) for number, prompt in enumerate(prompts, 1)]
    if options.fit and (limit := model.config.max_position_embeddings):
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
