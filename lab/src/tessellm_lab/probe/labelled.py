"""Labelled texts for the probe: JSON lines with `text`, `labels`, and perhaps `position` and `group`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tessellm.diagnose.prompts import shortened
from tessellm.errors import PromptError, nearest
from tessellm.text.inputs import check_characters, entries

LARGEST = sys.float_info.max
KEYS = ("text", "labels", "position", "group")


@dataclass(frozen=True)
class Labelled:
    """A text and what is to be read off it. A number is continuous, a string is a name."""

    text: str
    labels: dict[str, float | str]
    position: str | tuple[int, int] | None = None  # where to read: the last token, that of a span, or of a marker
    group: str | None = None  # examples of one group are never split between training and test; the text if None
    where: str = ""


def read_labelled(path: Path, skip_malformed: bool = False) -> tuple[list[Labelled], list[str]]:
    """The examples of a file, and what was wrong with the lines that were skipped. Unless asked to skip, the first
    malformed line is an error."""
    examples: list[Labelled] = []
    problems: list[str] = []
    for where, read in entries(path, ".jsonl"):
        try:
            examples.append(_as_example(read(), where, examples))
        except PromptError as error:
            problems.append(str(error))
            if not skip_malformed:
                raise
    if not examples:
        raise PromptError(
            f'{path} holds no examples. Expected lines such as {{"text": "…", "labels": {{"colour": "red"}}}}'
        )
    return examples, problems


def _as_example(entry: Any, where: str, earlier: Sequence[Labelled]) -> Labelled:
    try:
        example = _parsed(entry, where)
        _check_same_labels(example, earlier)
    except ValueError as error:
        raise PromptError(f"{where}: {error}") from error
    return example


def _parsed(entry: Any, where: str) -> Labelled:
    if not isinstance(entry, dict):
        raise ValueError(f'expected {{"text": …, "labels": …}}; got {_kind(entry)}')
    for key in entry:
        if key not in KEYS:
            raise ValueError(f"unknown key {key!r}; {nearest(key, KEYS)}")
    text, labels = entry.get("text"), entry.get("labels")
    if not isinstance(text, str) or not text:
        raise ValueError(f"'text' must be a text that is not empty; got {_kind(text)}")
    check_characters(text, where)
    if not isinstance(labels, dict) or not labels:
        raise ValueError(f"'labels' must name at least one constituent; got {_kind(labels)}")
    group = entry.get("group")
    if group is not None and not isinstance(group, str | int):
        raise ValueError(f"'group' must be a text or a whole number; got {_kind(group)}")
    values = {name: _label(name, value) for name, value in labels.items()}
    return Labelled(text, values, _position(entry.get("position"), text), None if group is None else str(group), where)


def _label(name: str, value: Any) -> float | str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float) and abs(value) <= LARGEST:
        return float(value)
    if isinstance(value, str) and value:
        return value
    raise ValueError(f"label {name!r} must be a finite number or a text; got {shortened(value)}")


def _position(value: Any, text: str) -> str | tuple[int, int] | None:
    if value is None:
        return None
    if isinstance(value, str) and value:
        if value not in text:
            raise ValueError(f"the position {value!r} does not stand in the text")
        return value
    if isinstance(value, list) and len(value) == 2 and all(type(end) is int for end in value):
        start, end = value
        if 0 <= start < end <= len(text):
            return start, end
        raise ValueError(f"the position {value} is no span of the text, which has {len(text)} characters")
    raise ValueError(f"'position' must be a text or [start, end] in characters; got {value!r}")


def _check_same_labels(example: Labelled, earlier: Sequence[Labelled]) -> None:
    if not earlier:
        return
    first = earlier[0].labels
    if example.labels.keys() != first.keys():
        raise ValueError(f"labels {sorted(example.labels)} differ from those of the first example, {sorted(first)}")
    for name, value in example.labels.items():
        if type(value) is not type(first[name]):
            raise ValueError(f"label {name!r} is {value!r} here and {first[name]!r} in the first example; expected all "
                             "numbers or all texts")  # fmt: skip


def _kind(value: Any) -> str:
    return "nothing" if value is None else repr(value) if isinstance(value, str) else type(value).__name__
