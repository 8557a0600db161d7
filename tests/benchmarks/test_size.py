"""The project's size is counted: reports of tests in both forms, lines by room, options."""

from __future__ import annotations

from pathlib import Path

import pytest

import size


def test_minutes_of_both_kinds_of_report(tmp_path: Path) -> None:
    durations, junit = tmp_path / "durations.txt", tmp_path / "junit.xml"
    durations.write_text(
        "= slowest durations =\n90.00s call     tests/a.py::b\n30.00s setup    tests/a.py::b\n1 passed\n"
    )
    junit.write_text(
        '<testsuites><testsuite time="9"><testcase time="45"/><testcase time="15"/></testsuite></testsuites>'
    )
    assert size.test_minutes(durations) == pytest.approx(2)
    assert size.test_minutes(junit) == pytest.approx(1)


def test_lines_are_counted_by_room(tmp_path: Path) -> None:
    (tmp_path / "room" / "inner").mkdir(parents=True)
    for name, count in (("top.py", 2), ("room/a.py", 3), ("room/inner/b.py", 4), ("room/data.txt", 9)):
        (tmp_path / name).write_text("x\n" * count)
    assert size.lines(tmp_path) == {"room": 7, "(top)": 2}


def test_every_command_has_its_options_counted() -> None:
    found = size.options()
    assert found["demo"] == 3  # --out, --adapters, --json
    assert found.keys() >= {"generate", "serve", "tune"}
