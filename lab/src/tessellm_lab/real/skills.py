"""The skills: where their data come from, under which licence, how long answers are, how long to train. Knows no model.

Data are files SKILL.SPLIT.jsonl.gz in one folder, lines of {"prompt", "answer"}; docs/experiments-real.md says where
to get them. A sample of them, and the adapters, are in the repository: nothing of either is in the package.
"""

from __future__ import annotations

import gzip
import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tessellm.demo.adapters import repository_folder
from tessellm.errors import PromptError, TessellmError, nearest

DATA = "TESSELLM_REAL_DATA"  # an environment variable


@dataclass(frozen=True)
class Skill:
    """What an expert is trained for. `steps` are of eight rows of 512 tokens."""

    name: str
    source: str
    licence: str
    steps: int
    new_tokens: int
    judged_by: str


SKILLS = {
    skill.name: skill
    for skill in (
        Skill("math", "GSM8K (openai/grade-school-math)", "mit", 1000, 256, "the number behind ####"),
        Skill("bash", "NL2Bash (TellinaTool/nl2bash)", "mit", 1000, 80, "the command, spaces normalised"),
        Skill("intents", "Snips NLU benchmark (snipsco/nlu-benchmark)", "cc0-1.0", 800, 96, "the JSON object"),
        Skill(
            "sql",
            "WikiSQL (jkkummerfeld/text2sql-data)",
            "bsd-3-clause",
            1000,
            96,
            "the query, case and spaces normalised",
        ),
        Skill(
            "code",
            "functions with docstrings of BSD- and Apache-licensed Python packages, and CodeAlpaca",
            "bsd-3-clause and apache-2.0",
            800,
            256,
            "HumanEval, pass@1",
        ),
        Skill(
            "capitals",
            "Alpaca examples of LLaMA-Factory's demo file, answers in capitals",
            "apache-2.0",
            75,
            112,
            "the share of capital letters",
        ),
    )
}


@dataclass(frozen=True)
class Example:
    """A prompt and the answer to it; `facts` are the other fields of the line."""

    prompt: str
    answer: str
    facts: dict[str, Any]


def check_skill(name: str) -> None:
    if name not in SKILLS:
        raise TessellmError(f"unknown skill {name!r}; {nearest(name, SKILLS)}")


def data_folder(given: Path | None = None) -> Path:
    """The folder with the data: as given, else what the environment names, else the repository's sample."""
    return repository_folder(given, DATA, "data/real")


def read(folder: Path, name: str, split: str, limit: int | None = None) -> list[Example]:
    """The examples of a skill (or of plain, humaneval) in that split, the first `limit` of them."""
    path = folder / f"{name}.{split}.jsonl.gz"
    return [_example(line, f"{path}, line {number}") for number, line in enumerate(read_texts(path, limit), 1)]


def read_texts(path: Path, limit: int | None = None) -> list[str]:
    """The first `limit` lines of a gzipped file."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            return file.readlines()[:limit]
    except FileNotFoundError as error:
        raise PromptError(
            f'{path} is missing: expected lines of {{"prompt": "…", "answer": "…"}}. lab/docs/experiments-real.md says '
            "where to get the data"
        ) from error
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise PromptError(f"{path} cannot be read: it is cut off or no gzip file. Copy or download it again") from error


def _example(line: str, where: str) -> Example:
    try:
        fields = json.loads(line)
        answer = fields.pop("answer") if "answer" in fields else fields["canonical_solution"]
        prompt = fields.pop("prompt")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PromptError(f'{where}: expected {{"prompt": "…", "answer": "…"}}') from error
    if not isinstance(prompt, str) or not isinstance(answer, str):
        raise PromptError(f"{where}: expected texts as prompt and answer")
    return Example(prompt, answer, fields)
