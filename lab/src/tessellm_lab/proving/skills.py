"""Twenty skills, their adapters and prompts: where they are in a clone of the repository. Knows no model.

Data are files SKILL.PART.jsonl.gz in lab/data/skills, whose README says where they come from; nothing of them is in a
wheel.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tessellm.demo.adapters import DOMAINS, adapters_folder, repository_folder
from tessellm.errors import TessellmError

from ..real.skills import Example, read, read_texts

DATA, ADAPTERS = "TESSELLM_SKILLS_DATA", "TESSELLM_SKILLS_ADAPTERS"  # environment variables
FIVE = DOMAINS  # the library's defaults were once made on these
FIFTEEN = (
    "advising", "clinc", "cogs", "concepts", "data2text", "define", "emotion", "equation", "fluent", "isodate",
    "medtopic", "ner", "regex", "spanish", "tldr",
)  # fmt: skip
TWENTY = (*FIVE, *FIFTEEN)
NO_INSTRUCTION = "fluent"  # its seen prompts are the input alone
BASE = "base"


@dataclass(frozen=True)
class Places:
    """Where prompts and adapters are."""

    data: Path
    five: Path
    fifteen: Path
    base: str = "smollm2"

    @classmethod
    def found(cls, base: str = "smollm2") -> Places:
        """Return the repository's folders, or those that the environment names."""
        data = repository_folder(None, DATA, "lab/data/skills")
        return cls(data, adapters_folder(None), repository_folder(None, ADAPTERS, "lab/adapters"), base)

    def adapter(self, name: str) -> Path:
        """Return the folder of a skill's adapter."""
        folder = (self.five if name in FIVE else self.fifteen) / name
        if not (folder / "adapter_config.json").is_file():
            raise TessellmError(
                f"there is no adapter in {folder}. Expected a clone of the repository with lab/adapters and "
                f"adapters/smollm2, or a folder of PEFT adapters in {ADAPTERS}"
            )
        return folder

    def examples(self, name: str, part: str, limit: int | None = None) -> list[Example]:
        """Return the first `limit` lines of a skill's (or of plain's, near's) part: train, dev, test or unseen."""
        return read(self.data, name, part, limit)

    def descriptions(self, kind: str = "sentence") -> Mapping[str, str]:
        """Return one line per skill."""
        return json.loads((self.data / "descriptions.json").read_text(encoding="utf-8"))[kind]


@dataclass(frozen=True)
class Asked:
    """A prompt, the member that should answer it, and the cell of the tables that it counts in."""

    cell: str
    expected: str
    messages: tuple[tuple[str, str], ...]  # (role, content); the last is the user's
    answer: str = ""

    @property
    def text(self) -> str:
        return self.messages[-1][1]


def skill_prompts(places: Places, names: Sequence[str], count: int | None) -> list[Asked]:
    """Return test prompts in the wordings of training (seen) and in others (unseen), `count` per skill and cell."""
    return [
        Asked(cell, name, (("user", example.prompt),), example.answer)
        for name in names
        for cell, part in (("seen", "test"), ("unseen", "unseen"))
        for example in places.examples(name, part, count)
    ]


def ordinary_prompts(places: Places) -> list[Asked]:
    """Return prompts that the base should answer: ordinary ones, and those near a skill's subject."""
    return [
        Asked(cell, BASE, (("user", line["prompt"]),))
        for cell, part in (("plain", "plain.test"), ("near", "near.test"))
        for line in map(json.loads, read_texts(places.data / f"{part}.jsonl.gz"))
    ]


def conversations(places: Places, part: str = "test") -> list[Asked]:
    """Return conversations whose last message asks for a skill, or for nothing of the kind."""
    found = []
    for line in map(json.loads, read_texts(places.data / f"conversations.{part}.jsonl.gz")):
        turns = tuple((turn["role"], turn["content"]) for turn in line["messages"])
        skill = line["skill"]
        expected = BASE if skill == "plain" else skill
        found.append(
            Asked("follow-ups" if expected == BASE else "conversations", expected, turns, line.get("answer", ""))
        )
    return found


def development_prompts(places: Places, name: str, count: int) -> list[str]:
    """Return examples as a user would give them: prompts of the development split."""
    return [example.prompt for example in places.examples(name, "dev", count)]
