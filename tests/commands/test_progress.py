"""Long work says how far it is: lines where there is no terminal, with the time that is left."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tessellm.commands import shared
from tessellm.commands.shared import Shown
from tessellm.routing import calibrated
from tessellm.routing.calibration import calibration_prompts

Cli = Callable[..., Any]


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "LINE_SECONDS", 0.0)


def test_commands_say_how_far_they_are(
    cli: Cli, at_once: None, members_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = sorted((text for text in calibration_prompts() if len(text) < 90), key=len)[-60:]
    monkeypatch.setattr(calibrated, "calibration_prompts", lambda: texts)
    monkeypatch.setenv("TESSELLM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "recipe.yaml").write_text(
        f"base: {members_dir / 'base'}\nexperts: {{math: {members_dir / 'lora_math'}}}\n"
    )
    ran = cli("compose", tmp_path / "recipe.yaml", "-o", tmp_path / "out")
    assert ran.code == 0
    assert re.search(r"calibrating the router: \d+ of 60, \d+ s left", ran.err)
    (tmp_path / "prompts.txt").write_text("".join(f"abc {number}\n" for number in range(5)))
    options = ("--batch-size", 2, "--max-new-tokens", 4)
    ran = cli("generate", tmp_path / "out", "--file", tmp_path / "prompts.txt", *options)
    assert re.findall(r"generating: (\d) of 5, \d+ s left", ran.err) == ["2", "3", "4"]
    ran = cli("diagnose", tmp_path / "out", tmp_path / "prompts.txt", *options)
    assert re.search(r"diagnosing: \d+ of 5, \d+ s left", ran.err)


def test_short_work_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Shown("working") as progress:
        for done in range(1, 6):
            progress(done, 5)
    assert capsys.readouterr().err == ""


def test_the_time_left_follows_from_what_was_done(
    at_once: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 10.0, 10.0, 20.0, 20.0, 620.0, 620.0, 630.0])
    monkeypatch.setattr(shared, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    progress = Shown("working")
    for done in (100, 110, 120):
        progress(done, 200)
    assert capsys.readouterr().err.splitlines() == [
        "working: 110 of 200, 90 s left",
        "working: 120 of 200, 41 min left",
    ]
