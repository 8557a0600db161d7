"""The examples run, at tiny size; the notebook is made of the script that runs here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"


def run(folder: Path, name: str, *given: object, **variables: str) -> str:
    ran = subprocess.run(
        [sys.executable, EXAMPLES / name, *map(str, given)],
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_compose_and_generate(members_dir: Path, tmp_path: Path) -> None:
    given = (members_dir / "base", members_dir / "lora_math", members_dir / "coding", "--prompt", "abc")
    assert run(tmp_path, "compose_and_generate.py", *given, "--max-new-tokens", 4).startswith("abc")


def test_steer_away(members_dir: Path, tmp_path: Path) -> None:
    given = (members_dir / "base", members_dir / "math", members_dir / "coding", "--prompt", "abc")
    plain, steered = run(tmp_path, "steer_away.py", *given, "--max-new-tokens", 4).splitlines()
    assert plain.startswith("[0.0, 0.0] abc")
    assert steered.startswith("[1.0, -0.5] abc")


@pytest.mark.parametrize(("prompt", "selected"), [("ab", "short"), ("abc" * 20, "long")])
def test_own_router(chatting: dict[str, Any], tmp_path: Path, prompt: str, selected: str) -> None:
    given = (chatting["base"], *chatting["experts"].values(), "--prompt", prompt, "--max-new-tokens", 4)
    assert run(tmp_path, "own_router.py", *given).splitlines()[0] == selected


def test_the_first_ten_minutes(chatting: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(chatting))
    out = run(tmp_path, "first_ten_minutes.py", TESSELLM_MODEL="recipe.yaml", NEW_TOKENS="4")
    assert out.startswith("base\none\ntwo\nrule: mixture\n")
    assert out.endswith("mixture base one two\n")


def test_the_notebook_holds_the_script() -> None:
    cells = json.loads((EXAMPLES / "first_ten_minutes.ipynb").read_text(encoding="utf-8"))["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    script = (EXAMPLES / "first_ten_minutes.py").read_text(encoding="utf-8")
    assert [line for line in code.splitlines() if line] == [
        line for line in script.splitlines() if line and not line.startswith("#")
    ]
