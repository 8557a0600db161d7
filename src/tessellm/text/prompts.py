"""Prompts as token ids: tokenized, put into the chat template, checked for length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..errors import PromptError
from ..model import ComposedForCausalLM
from .options import TextOptions


def tokenizer_of(model: ComposedForCausalLM) -> Any:
    if model.tokenizer is None:
        raise PromptError("no member came with a tokenizer, so text cannot be read. Save one into the base's folder")
    return model.tokenizer


def encode_examples(model: ComposedForCausalLM, examples: Sequence[tuple[str, str]]) -> list[tuple[list[int], int]]:
    """Token ids of a prompt and its text, none longer than the members' context, and how many are the prompt's."""
    tokenizer, limit = tokenizer_of(model), model.config.max_position_embeddings
    encoded = []
    for number, (prompt, text) in enumerate(examples, 1):
        row = tokenizer(prompt + text)["input_ids"]
        if limit and len(row) > limit:
            raise PromptError(f"text {number} has {len(row)} tokens; the members' shortest context is {limit}")
        encoded.append((row, len(tokenizer(prompt)["input_ids"]) if prompt else 0))
    return encoded


def encode_prompts(
    model: ComposedForCausalLM, prompts: Sequence[str], options: TextOptions
) -> tuple[list[list[int]], TextOptions]:
    """Their token ids, and the options, with fewer new tokens where they are to fit."""
    if "" in options.stop:
        raise PromptError("a stop text must not be empty: every text holds it")
    tokenizer, limit = tokenizer_of(model), model.config.max_position_embeddings
    texts = [as_chat(tokenizer, prompt) if options.chat else prompt for prompt in prompts]
    rows = [tokenizer(text, add_special_tokens=not options.chat)["input_ids"] for text in texts]
    if options.fit and limit:
        room = limit - max(map(len, rows), default=0)
        options = replace(options, max_new_tokens=max(1, min(options.max_new_tokens, room)))
    check_lengths(model, rows, options.max_new_tokens)
    return rows, options


def check_lengths(model: ComposedForCausalLM, rows: Sequence[Sequence[int]], new: int) -> None:
    for number, row in enumerate(rows, 1):
        if not row:
            raise PromptError(f"prompt {number} is empty, and the tokenizer adds no beginning-of-text token")
        model.config.check_room(len(row), new, f"prompt {number}", "--max-new-tokens")


def as_chat(tokenizer: Any, prompt: str) -> str:
    if not tokenizer.chat_template:
        raise PromptError("no member has a chat template; leave out --chat")
    try:
        return tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # a template raises what it likes
        raise PromptError(f"the chat template cannot be used: {error}. Mend it, or leave out --chat") from error
