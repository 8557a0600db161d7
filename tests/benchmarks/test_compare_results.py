"""Two folders of results are the same, or what differs is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from compare_results import main


def write(folder: Path, **claims: Any) -> Path:
    folder.mkdir()
    rows = [{"id": name, "value": value, "holds": value > 0} for name, value in claims.items()]
    (folder / "one.json").write_text(json.dumps({"claims": rows}))
    return folder


def test_it_names_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = write(tmp_path / "before", a=1, b=2, c=3)
    assert main([str(before), str(write(tmp_path / "same", a=1, b=2, c=3, d=4))]) == 0
    assert capsys.readouterr().out == "one: 3 claims, 0 differ, 1 came new\n"
    assert main([str(before), str(write(tmp_path / "other", a=1, b=-2))]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "one: 3 claims, 2 differ, 0 came new",
        "  b: 2 (holds) → -2 (does not hold)",
        "  c: 3 (holds) → gone",
    ]


def test_a_folder_without_results_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path), str(tmp_path)])
    assert ended.value.code == 2
    assert "has no results" in capsys.readouterr().err
