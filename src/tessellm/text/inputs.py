"""Texts from the command line and from files: lines, JSON lists, JSON lines."""

from __future__ import annotations

import json
import sys
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import PromptError


def read_prompts(prompts: Sequence[str], file: Path | None) -> list[str]:
    """Read prompts from the command line (- is standard input) and from a file."""
    found = [_standard_input() if prompt == "-" else prompt for prompt in prompts]
    for number, prompt in enumerate(found, 1):
        check_characters(prompt, f"prompt {number}")
    if file is not None:
        found += read_texts(file, "prompt")
    if not found:
        if file is not None:
            raise PromptError(f"{file} holds no prompts. Expected one a line")
        raise PromptError("no prompt was given. Expected prompts as arguments, or --file with one a line")
    return found


def _standard_input() -> str:
    if sys.stdin is None or sys.stdin.closed:
        raise PromptError("standard input is closed. Expected a prompt there, or as an argument in the place of -")
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise PromptError("standard input cannot be read: it is not UTF-8 text") from error
    except OSError as error:
        raise PromptError(f"standard input cannot be read: {error.strerror}") from error


def read_texts(path: Path, key: str) -> list[str]:
    """Read texts from a JSON list or JSON lines (of strings, or with that key), or from the lines of any other file."""
    return [_text_of(entry, key, where) for where, entry in _entries(path)]


def read_schema(path: Path) -> dict[str, Any]:
    """Read a JSON schema from a file."""
    try:
        found = _parse(_decoded(path.read_bytes().removeprefix(BOM_UTF8), str(path)), str(path))
    except OSError as error:
        raise PromptError(f"{path} cannot be read: {error.strerror}") from error
    if not isinstance(found, dict):
        raise PromptError(f"{path}: expected a JSON schema, which is a mapping; got {type(found).__name__}")
    return found


class SkillText(NamedTuple):
    """A prompt, which may be empty, the text that should follow it, and the skill that both are of."""

    prompt: str
    text: str
    skill: str


class LabelledPrompt(NamedTuple):
    """A prompt, and the member that should answer it where the file says so."""

    prompt: str
    label: str | None = None
    where: str = ""


def read_labelled(path: Path) -> list[LabelledPrompt]:
    """Read prompts as `read_texts` does; an entry may have the key skill or label."""
    return [
        LabelledPrompt(
            _text_of(entry, "prompt", where),
            _part(entry, "label", where) or _part(entry, "skill", where) or None,
            where,
        )
        for where, entry in _entries(path)
    ]


def read_examples(paths: Sequence[Path]) -> list[SkillText]:
    """Read texts with their prompts. A text's skill is what it says itself; else its file's name, of several files."""
    found = [
        SkillText(
            _part(entry, "prompt", where), _text_of(entry, "text", where), _part(entry, "skill", where) or of_file
        )
        for path in paths
        for of_file in (path.stem if len(paths) > 1 else "",)
        for where, entry in _entries(path)
    ]
    if not found:
        raise PromptError(f"{', '.join(map(str, paths))} holds no texts. Expected one a line")
    return found


def _part(entry: Any, key: str, where: str) -> str:
    """Read what an entry need not have."""
    return _text_of(entry, key, where) if isinstance(entry, dict) and key in entry else ""


def _entries(path: Path) -> list[tuple[str, Any]]:
    """List each entry with its place in the file: JSON, or text."""
    return [(where, read()) for where, read in entries(path)]


def entries(path: Path, suffix: str | None = None) -> list[tuple[str, Callable[[], Any]]]:
    """List each entry's place in the file and how to read it; reading a malformed entry raises PromptError. The file's
    name says of which kind it is, unless `suffix` does."""
    suffix = path.suffix if suffix is None else suffix
    try:
        content = path.read_bytes().removeprefix(BOM_UTF8)
    except OSError as error:
        raise PromptError(f"{path} cannot be read: {error.strerror}") from error
    if _is_utf16(content):
        raise PromptError(f"{path} cannot be read: it is UTF-16 text. Save it as UTF-8")
    if suffix == ".json":
        found = _parse(_decoded(content, str(path)), str(path))
        if not isinstance(found, list):
            raise PromptError(f"{path}: expected a list; got {type(found).__name__}")
        return [(f"{path}, entry {number}", partial(_same, entry)) for number, entry in enumerate(found, 1)]
    lines = [(f"{path}, line {n}", line) for n, line in enumerate(content.split(b"\n"), 1) if line.strip()]
    read = _parsed_line if suffix == ".jsonl" else _decoded
    return [(where, partial(read, line.removesuffix(b"\r"), where)) for where, line in lines]


def _is_utf16(content: bytes) -> bool:
    """Recognise UTF-16 by its byte order mark, or by English text: every other byte is zero."""
    start = content[:4096]
    return start.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) or start.count(0) > len(start) // 4


def _same(entry: Any) -> Any:
    return entry


def _decoded(content: bytes, where: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PromptError(f"{where} cannot be read: it is not UTF-8 text") from error


def _parsed_line(line: bytes, where: str) -> Any:
    return _parse(_decoded(line, where), where)


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PromptError(f"{where}: no valid JSON ({error})") from error


def _text_of(entry: Any, key: str, where: str) -> str:
    text = entry.get(key) if isinstance(entry, dict) else entry
    if not isinstance(text, str):
        raise PromptError(f'{where}: expected {{"{key}": "…"}} or a string')
    check_characters(text, where)
    return text


def check_characters(text: str, where: str) -> None:
    """Refuse half a character (\\ud800), which JSON can hold and no tokenizer reads."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PromptError(
            f"{where}: character {error.start + 1} is half a character ({text[error.start]!r})"
        ) from error
