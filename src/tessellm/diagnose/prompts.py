"""Prompt sets: what a composition is diagnosed on. A prompt is continued by it, a text read as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import PromptError
from ..model import ComposedForCausalLM
from ..text.inputs import check_characters, entries
from ..text.options import TextOptions
from ..text.prompts import encode_prompt

SHOWN = 5


@dataclass(frozen=True)
class Example:
    """A prompt, and the text after it; None: the composition writes it."""

    prompt: str
    text: str | None = None
    where: str = ""


def as_example(entry: Any, where: str) -> Example:
    """A string is a prompt; a mapping has `prompt`, `text`, or both."""
    if isinstance(entry, Example):
        return entry
    if isinstance(entry, str):
        entry = {"prompt": entry}
    if not isinstance(entry, dict) or not {"prompt", "text"} & set(entry):
        raise PromptError(f'{where}: expected a string, {{"prompt": "…"}} or {{"text": "…"}}; got {shortened(entry)}')
    for key in ("prompt", "text"):
        if not isinstance(entry.get(key, ""), str):
            raise PromptError(f"{where}: {key} should be a string; got {shortened(entry[key])}")
        check_characters(entry.get(key, ""), where)
    if entry.get("prompt") and entry.get("text") == "":
        raise PromptError(f"{where}: the text is empty. Leave it out to have the prompt continued")
    if not entry.get("prompt") and not entry.get("text"):
        raise PromptError(f"{where}: the prompt is empty")
    return Example(entry.get("prompt", ""), entry.get("text"), where)


def shortened(value: Any, length: int = 40) -> str:
    shown = repr(value)
    return shown if len(shown) <= length else shown[:length] + "…"


def read_examples(path: Path, skip_malformed: bool = False) -> tuple[list[Example], list[str]]:
    """The examples of a file (.jsonl, .json, or lines of text), and what was wrong with those that were left out.
    Unless asked to skip them, malformed entries are an error that names them."""
    examples: list[Example] = []
    problems: list[str] = []
    for where, read in entries(path):
        try:
            examples.append(as_example(read(), where))
        except PromptError as error:
            problems.append(str(error))
    return _kept(examples, problems, skip_malformed, str(path))


def without_repeats(examples: Sequence[Example]) -> tuple[list[Example], list[str]]:
    """Keep the first of equal examples, which say nothing new, and say which were left out."""
    first: dict[tuple[str, str | None], Example] = {}
    repeated: list[str] = []
    for number, example in enumerate(examples, 1):
        before = first.setdefault((example.prompt, example.text), example)
        if before is not example:
            where, there = example.where or f"prompt {number}", before.where or "an earlier one"
            repeated.append(f"{where}: the same as {there}, counted once")
    return list(first.values()), repeated


def check_examples(
    model: ComposedForCausalLM, examples: Sequence[Example], options: TextOptions, skip_malformed: bool = False
) -> tuple[list[Example], list[str]]:
    """Those that the members' context and tokenizer can take."""
    fits: list[Example] = []
    problems: list[str] = []
    for number, example in enumerate(examples, 1):
        try:
            _check_length(model, example, options, example.where or f"prompt {number}")
            fits.append(example)
        except PromptError as error:
            problems.append(str(error))
    return _kept(fits, problems, skip_malformed, "the prompts", "correct them, lower --max-new-tokens")


def _check_length(model: ComposedForCausalLM, example: Example, options: TextOptions, name: str) -> None:
    if options.chat is not None and not example.prompt:
        raise PromptError(f"{name}: it has no prompt, which --chat and --system put into the chat template. Give one")
    size, before = (
        len(encode_prompt(model, example.prompt, name, options.chat, text)) if example.prompt or text else 0
        for text in (example.text or "", "")
    )
    first = max(1, before) if example.text is not None else 0
    if size <= first:
        raise PromptError(
            f"{name}: too short, it has {size} tokens; the first that is judged would be number {first + 1}"
        )
    model.config.check_room(size, options.max_new_tokens if example.text is None else 0, name, "--max-new-tokens")


def _kept(
    examples: list[Example], problems: list[str], skip_malformed: bool, source: str, cure: str = "correct them"
) -> tuple[list[Example], list[str]]:
    if problems and not skip_malformed:
        more = f"\n… and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        listed = "\n".join(problems[:SHOWN]) + more
        raise PromptError(f"{listed}\nFix: {cure}, or leave them out (--skip-malformed)")
    if not examples:
        raise PromptError(f"{source}: nothing to diagnose" + (f"; {problems[0]}" if problems else ""))
    return examples, problems
