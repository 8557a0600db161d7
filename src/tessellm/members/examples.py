"""What an expert is for, as a user says it: a line of description, and examples of prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..errors import MemberError

LONGEST = 500  # characters of a description
LARGEST = 16 << 20  # bytes of a file of examples


def checked_description(description: str) -> str:
    """Return a description as one line; refuse one that says nothing."""
    line = " ".join(description.split())
    if not line or len(line) > LONGEST:
        what = f"{len(line)} characters" if line else "an empty text"
        raise MemberError(f"description: expected one line of at most {LONGEST} characters; got {what}")
    return line


def read_examples(examples: str | Path | Sequence[str]) -> tuple[str, ...]:
    """Return example prompts, given or in a file: lines of text or, in .jsonl and .json, texts or the key prompt."""
    found = tuple(_entries(Path(examples))) if isinstance(examples, str | Path) else tuple(examples)
    if not found:
        raise MemberError("examples: expected at least one prompt. Leave the key out where there is none")
    for place, text in enumerate(found, 1):
        if not isinstance(text, str) or not text.strip():
            raise MemberError(
                f"examples: expected texts; number {place} is {'empty' if text == '' else repr(text)[:80]}"
            )
    return found


def _entries(path: Path) -> Iterator[Any]:
    try:
        if path.stat().st_size > LARGEST:
            raise MemberError(f"examples: {path} has more than {LARGEST:,} bytes")
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise MemberError(f"examples: {path} cannot be read: {why}. Expected a list of prompts, or a file") from error
    lines = [line for line in text.splitlines() if line.strip()]
    try:
        if path.suffix == ".json":
            lines = json.loads(text)
        elif path.suffix == ".jsonl":
            lines = [json.loads(line) for line in lines]
    except (ValueError, RecursionError) as error:
        raise MemberError(f"examples: {path} is no valid JSON: {error}") from error
    if not isinstance(lines, list):
        raise MemberError(f"examples: {path} holds no list of prompts")
    yield from (line.get("prompt") if isinstance(line, dict) else line for line in lines)
