"""kill -9 while experts are composed, added and removed: the old composition is there, or the new one, and loads."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tessellm import checkpoint
from tessellm.checkpoint.reader import read_config

KILLED = """
import os, sys
from tessellm import files

def killed(*given, **options):
    os.kill(os.getpid(), 9)

def killed_behind(*given, **options):
    swap(*given, **options)
    killed()

swap = files._swap
if sys.argv[1] == "before":
    files._swap = killed
elif sys.argv[1] == "behind":
    files._swap = killed_behind
elif sys.argv[1] == "inside":  # where folders cannot be exchanged in one step
    files._exchanged = lambda *_: False
    files.Path.rename = lambda self, target, rename=files.Path.rename: (rename(self, target), killed())
sys.argv = ["tessellm", *sys.argv[2:]]
from tessellm.cli import main
main()
"""


@pytest.fixture
def folder(own_members: Path) -> Path:
    (own_members / "recipe.json").write_text(
        json.dumps({"base": "./base", "experts": {"math": "./lora_math", "more": "./math"}, "rule": "product"})
    )
    assert run(own_members, "nowhere", "compose", "recipe.json", "-o", "out").returncode == 0
    return own_members


def run(folder: Path, when: str, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", KILLED, when, *command], cwd=folder, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("when", "command", "there"),
    [
        ("before", ("add", "out", "lora_coding"), ["base", "math", "more"]),
        ("behind", ("add", "out", "lora_coding"), ["base", "math", "more", "lora_coding"]),
        ("before", ("remove", "out", "more"), ["base", "math", "more"]),
        ("behind", ("remove", "out", "more"), ["base", "math"]),
        ("behind", ("compose", "recipe.json", "-o", "out"), ["base", "math", "more"]),
    ],
)
def test_the_old_or_the_new_one_is_there(folder: Path, when: str, command: tuple[str, ...], there: list[str]) -> None:
    ran = run(folder, when, *command)
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    assert list(checkpoint.load(folder / "out").members) == there
    assert run(folder, "nowhere", "add", "out", "coding").returncode == 0  # and clears what was left
    assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]
    assert read_config(folder / "out").member_names == [*there, "coding"]


def test_one_that_was_being_replaced_comes_back(folder: Path) -> None:
    assert run(folder, "inside", "remove", "out", "more").returncode == -signal.SIGKILL
    assert not (folder / "out").exists()
    assert run(folder, "nowhere", "compose", "recipe.json", "-o", "out").returncode == 0
    assert read_config(folder / "out").member_names == ["base", "math", "more"]
    assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]
