"""Model cards: what the README.md beside an adapter says of it, in its YAML metadata or in a sentence of its own.

---
base_model: google/gemma-2-2b
description: Translates German into English.
style: true                                   # only of an adapter that concerns every prompt, such as a tone
---
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

LARGEST = 1 << 18  # bytes of a card that are read
UNDESCRIBED = "no description"
SHOWN = 5  # names in a note
LONGEST = 300  # characters of a description
WORDS = range(4, 41)  # of a sentence that describes something
FRONT = re.compile(r"\A---[ \t]*\n(.*?)\n---[ \t]*(?:\n|\Z)", re.DOTALL)
NOT_PROSE = re.compile(r"<!--.*?-->|```.*?```|^[ \t]*(?:[#|>!\[*+-]|\d+\.|</?\w)[^\n]*$", re.DOTALL | re.MULTILINE)
SECTION = re.compile(r"^##", re.MULTILINE)
SENTENCE = re.compile(r"[^.!?\n]+[.!?](?=\s|$)")
BOILERPLATE = re.compile(  # of cards that trainers write by themselves
    r"fine-?tuned version of|trained (using|with|for|on)\b|model card|more information|framework version|"
    r"\b(lora|peft|qlora)\b|adapter|unsloth|base model|intended use|direct and downstream|code below to get started|"
    r"carbon emissions|merge of pre-?trained|chat template|evaluation set|licen[cs]e|generated automatically",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Card:
    """What a card says of its adapter."""

    description: str | None = None
    style: bool = False


def read_card(folder: Path) -> Card:
    """Return what the README.md in a folder says; nothing where there is none or it cannot be read."""
    try:
        with (folder / "README.md").open("rb") as file:
            text = file.read(LARGEST).decode("utf-8", "replace").lstrip("\ufeff").replace("\r\n", "\n")
    except OSError:
        return Card()
    front = FRONT.match(text)
    metadata = _metadata(front[1]) if front else {}
    description = metadata.get("description")
    if not isinstance(description, str) or not description.strip():
        description = _own_sentence(text[front.end() :] if front else text)
    return Card(_shortened(description), metadata.get("style") is True)


def _metadata(text: str) -> dict[str, Any]:
    """Read the metadata; a line that is no YAML spoils them all."""
    try:
        content = yaml.safe_load(text) if "&" not in text else None  # an alias can stand for billions of values
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _own_sentence(body: str) -> str | None:
    """Return the first sentence of a card's introduction that its author may have written, about what the adapter does.
    What PEFT writes by itself stands under headings."""
    prose = NOT_PROSE.sub("\n\n", SECTION.split(body, maxsplit=1)[0])
    for paragraph in re.split(r"\n\s*\n", prose):
        found = SENTENCE.match(" ".join(paragraph.split()))
        if found and len(found[0].split()) in WORDS and not BOILERPLATE.search(found[0]):
            return found[0]
    return None


def _shortened(text: str | None) -> str | None:
    """Return a text in one line, cut between words where it is too long."""
    line = " ".join((text or "").split())
    if len(line) <= LONGEST:
        return line or None
    return line[:LONGEST].rpartition(" ")[0] or line[:LONGEST]


def note_undescribed(names: Sequence[str]) -> str:
    """Say which experts have no description, and where one is given."""
    shown = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
    return (
        f"{UNDESCRIBED}: {shown}. A line `description: …` in the recipe, or in the metadata of the README.md beside "
        "an adapter, lets more prompts find it, above all those in other words than it was trained on"
    )
