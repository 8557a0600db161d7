"""Mutants change one place of a file each, and the file is as it was afterwards."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

import mutate

SOURCE = '''"""A π before the columns."""
def clamp(x: int = 0, most: float = 0.0) -> int:
    µ = not x; return x if x < most and x is not None else f"{x + 1}"
    raise ValueError(1 + 1)
'''


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(mutate, "ROOT", tmp_path)
    path = tmp_path / "clamp.py"
    path.write_text(SOURCE)
    return path


def test_every_mutant_is_another_program_with_one_change(file: Path) -> None:
    found = mutate.mutants(file)
    assert [(each.old, each.new) for each in found] == [
        ("0", "(1)"),
        ("0.0", "(1.0)"),
        ("not x", "(x)"),
        ("x < most and x is not None", "(x < most or x is not None)"),
        ("x < most", "(x <= most)"),
        ("x is not None", "(x is None)"),
    ]
    for each in found:
        assert ast.dump(ast.parse(each.apply(SOURCE))) != ast.dump(ast.parse(SOURCE))


def test_a_file_is_put_back_with_its_time(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, seen = file.stat().st_mtime_ns, []

    def failing(tests: list[str]) -> Any:
        seen.append(file.read_text())
        raise KeyboardInterrupt

    monkeypatch.setattr(mutate, "failing", failing)
    mutant = mutate.mutants(file)[0]
    with pytest.raises(KeyboardInterrupt):
        mutate.run(mutant, [])
    assert seen == [mutant.apply(SOURCE)]
    assert (file.read_text(), file.stat().st_mtime_ns) == (SOURCE, before)
