"""The prompts on which routing is chosen and reported: skills in seen and in other wordings, and ordinary ones.

Knows the files of the data; no models.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tessellm.routing.calibration import calibration_prompts

BASE = "base"
PART_FILES = {"seen": "test", "unseen": "unseen", "dev": "dev"}
EXAMPLES = 32  # prompts of dev that may serve as examples
RAW = 5  # prompts per skill that are read without the template, too


@dataclass(frozen=True)
class LabelledPrompt:
    """A chat whose last message is the user's, and the member that should answer it."""

    part: str
    skill: str
    messages: tuple[tuple[str, str], ...]  # role, content
    template: bool = True

    @property
    def text(self) -> str:
        return self.messages[-1][1]


def labelled_prompts(data: Path, skills: list[str], count: int) -> Iterator[LabelledPrompt]:
    """Return all prompts, `count` per skill and part, those that calibrate first."""
    yield from (_single("calibration", BASE, text) for text in calibration_prompts())
    for part in ("plain.dev", "plain.test", "near.test"):
        yield from (_single(part, BASE, line["prompt"]) for line in _lines(data / "real2" / f"{part}.jsonl.gz"))
    for part, name in PART_FILES.items():
        wanted = EXAMPLES if part == "dev" else count
        for skill in skills:
            for line in _spread(_skill_lines(data, skill, name), wanted):
                yield _single(part, skill, line["prompt"])
    for part in ("conversations.dev", "conversations.test"):
        for line in _lines(data / "real2" / f"{part}.jsonl.gz"):
            skill = BASE if line["skill"] == "plain" else line["skill"]
            messages = tuple((each["role"], each["content"]) for each in line["messages"])
            yield LabelledPrompt(part, skill, messages)
            yield _single(f"{part}.last", skill, messages[-1][1])
    for part in ("seen", "unseen"):
        for skill in skills:
            for line in _spread(_skill_lines(data, skill, PART_FILES[part]), RAW):
                yield LabelledPrompt(f"raw.{part}", skill, (("user", line["prompt"]),), template=False)


def _single(part: str, skill: str, text: str) -> LabelledPrompt:
    return LabelledPrompt(part, skill, (("user", text),))


def _skill_lines(data: Path, skill: str, name: str) -> list[dict[str, Any]]:
    folders = (data / "real2", data / "real")
    return _lines(next(file for folder in folders if (file := folder / f"{skill}.{name}.jsonl.gz").exists()))


def _spread(lines: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Return lines from all over a file, which may be ordered."""
    return [lines[place * len(lines) // count] for place in range(min(count, len(lines)))]


def _lines(file: Path) -> list[dict[str, Any]]:
    with gzip.open(file, "rt", encoding="utf-8") as opened:
        return [json.loads(line) for line in opened]
