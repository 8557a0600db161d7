"""Small data in the real files' format, a small base with chat template, and adapters trained on it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conftest import build_model, character_tokenizer, save_member

BASE_NAME = "tiny-base"
SHORT = {  # a prompt and its answer per number, all of characters that the tokenizer knows
    "math": lambda n: (f"add {n} and 1", f"{n}+1={n + 1}\n=: {n + 1}"),
    "bash": lambda n: (f"list folder {n}", f"ls {n}"),
    "intents": lambda n: (f"play song {n}", f"play {n}"),
    "sql": lambda n: (f"rows of {n}", f"select {n}"),
    "code": lambda n: (f"function {n}", f"return {n}"),
    "capitals": lambda n: (f"say {n}", "ABC"),
    "plain": lambda n: (f"say {n}", "abc"),
}
PROBLEM = {
    "task_id": "HumanEval/0", "prompt": "def one():\n", "entry_point": "one", "canonical_solution": "    return 1\n",
    "test": "def check(candidate):\n    assert candidate() == 1\n",
}  # fmt: skip


def write_data(folder: Path, train: int = 12, held_out: int = 3) -> Path:
    """SKILL.SPLIT.jsonl.gz of every skill, of plain and of HumanEval."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in SHORT.items():
        for split, count in (("train", train), ("dev", held_out), ("test", held_out)):
            lines = [dict(zip(("prompt", "answer"), make(number), strict=True)) for number in range(count)]
            write_lines(folder / f"{name}.{split}.jsonl.gz", lines)
    write_lines(folder / "humaneval.test.jsonl.gz", [PROBLEM])
    return folder


def write_lines(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def write_base(folder: Path) -> Path:
    """A random Llama that says where adapters of it may go."""
    return save_member(build_model("llama", 0), folder / BASE_NAME, character_tokenizer())
