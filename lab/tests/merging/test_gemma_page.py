"""The page on Gemma 2 2B: its estimates are the planner's, its commands are commands."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest
import typer

from tessellm.commands.app import app
from tessellm.evaluate.evaluation import EvaluationPlan
from tessellm_lab.merging.table import MergePlan

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "lab" / "docs" / "gemma-2-2b.md").read_text(encoding="utf-8")
COMMANDS = [shlex.split(line)[1:] for line in re.findall(r"^\$ (tessellm .*)$", PAGE, re.MULTILINE)]


def test_estimates_are_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "lab" / "docs"))
    page = importlib.import_module("generate_gemma")
    assert page.needs("base").weight_bytes == 2 * 2_614_341_888  # by its model card
    monkeypatch.setattr("sys.argv", ["generate_gemma.py", "--check"])
    assert page.main() == 0


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_commands_are_understood(words: list[str]) -> None:
    group = typer.main.get_command(app)
    command = group.get_command(None, words[0])  # type: ignore[attr-defined,arg-type]
    given = command.make_context(words[0], list(words[1:])).params
    if words[0] in ("evaluate", "merges"):
        tasks, rules = (tuple(filter(None, given[key].split(","))) for key in ("tasks", "rules"))
        assert EvaluationPlan(tasks, rules=rules).tasks == ("gsm8k", "math", "humaneval", "mbpp")
    if words[0] == "merges":
        assert MergePlan((given["methods"],)).for_experts(2).part.develop == 50
    for word in words:
        assert not word.startswith("recipes/") or (ROOT / word).is_file()
