"""Terminals and pipes of every kind: one message or none, never a traceback; a terminal is shown no escape sequence."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tessellm
from tessellm.commands.streams import OnTerminal

COMMAND = [sys.executable, "-m", "tessellm.cli"]
ESCAPE = "a\x1b]0;title\x07b"


@pytest.fixture(scope="module")
def folder(members_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A composition, its recipe and prompts."""
    folder = tmp_path_factory.mktemp("streams")
    (folder / "recipe.yaml").write_text(f"base: {members_dir / 'base'}\nexperts: {{math: {members_dir / 'math'}}}\n")
    tessellm.compose(members_dir / "base", {"math": members_dir / "math"}).save_pretrained(folder / "out")
    (folder / "prompts.txt").write_text("abc é\n" + ESCAPE + "\n", encoding="utf-8")
    return folder


def ran(folder: Path, *arguments: object, shell: str = '"$@"', **environment: str) -> subprocess.CompletedProcess[str]:
    """A real process, started by a shell that may redirect its streams."""
    command = ["sh", "-c", shell, "sh", *COMMAND, *map(str, arguments)]
    return subprocess.run(
        command, cwd=folder, env=os.environ | environment, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize(
    "arguments",
    [
        "compose recipe.yaml -o é",
        "inspect out",
        "diagnose out prompts.txt --max-new-tokens 4",
        "generate out é --max-new-tokens 4 --trace",
        "reproduce --list",
    ],
)
def test_an_ascii_terminal(folder: Path, arguments: str) -> None:
    found = ran(folder, *arguments.split(), PYTHONIOENCODING="ascii", LANG="C", LC_ALL="C")
    assert found.returncode == 0, found.stderr
    assert found.stdout.isascii()
    assert "Traceback" not in found.stderr


@pytest.mark.parametrize("arguments", ["--help", "generate out abc --max-new-tokens 4"])
def test_standard_output_on_a_full_disk(folder: Path, arguments: str) -> None:
    found = ran(folder, *arguments.split(), shell='"$@" > /dev/full')
    assert found.stderr == "error: standard output could not be written: No space left on device\n"
    assert found.returncode == 1


def test_closed_streams(folder: Path) -> None:
    closed = '"$@" >&- <&- 2>&-'
    assert ran(folder, "generate", "out", "abc", "--trace", "--max-new-tokens", 3, shell=closed).returncode == 0
    found = ran(folder, "generate", "out", "-", shell='"$@" <&-')
    assert found.stderr.startswith("error: standard input is closed. ")
    assert found.returncode == 2


def test_a_width_of_nothing(folder: Path) -> None:
    assert "parameters" in ran(folder, "inspect", "out", COLUMNS="0").stdout
    assert "Compose language models" in ran(folder, "--help", COLUMNS="0").stdout


@pytest.mark.parametrize("command", ["generate {} hi", "inspect {}", "inspect {} --plan", "compose recipe.yaml -o {}"])
def test_a_name_that_no_file_has(
    cli: Callable[..., Any], folder: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(folder)
    found = cli(*command.format("x" * 5000).split())
    assert found.code == 2
    assert found.err.startswith("error: ")
    assert "characters" in found.err
    assert len(found.err) < 200
    assert found.err.count("\n") == 1


def test_compose_of_a_folder_explains_itself(cli: Callable[..., Any], folder: Path, tmp_path: Path) -> None:
    found = cli("compose", folder / "out", "-o", tmp_path / "new")
    assert found.code == 2
    assert "is a folder. Expected a recipe" in found.err
    assert f"tessellm inspect {folder / 'out'}" in found.err
    assert "inspect" not in cli("compose", folder, "-o", tmp_path / "new").err


def on_terminal(folder: Path, *arguments: object) -> str:
    """What a terminal is sent, without rich's own styles."""
    pid, terminal = pty.fork()
    if not pid:
        os.chdir(folder)
        os.execve(COMMAND[0], [*COMMAND, *map(str, arguments)], os.environ | {"TERM": "dumb", "COLUMNS": "120"})
    shown = b""
    while True:
        try:
            shown += os.read(terminal, 4096)
        except OSError:  # it has ended
            break
    os.waitpid(pid, 0)
    os.close(terminal)
    return shown.decode()


def test_a_terminal_is_shown_no_escape_sequence(cli: Callable[..., Any], folder: Path) -> None:
    shown = on_terminal(folder, "generate", "out", "--file", "prompts.txt", "--max-new-tokens", 3, "--json", "a.json")
    assert "a␛]0;title␇b" in shown
    assert "\x1b]" not in shown
    assert ESCAPE in [each["prompt"] for each in json.loads((folder / "a.json").read_text())]
    assert ESCAPE in cli("generate", folder / "out", "--file", folder / "prompts.txt", "--max-new-tokens", 3).out
    wrong = on_terminal(folder, "inspect", f"./{ESCAPE}")
    assert "␛" in wrong
    assert "\x1b]" not in wrong


@pytest.mark.parametrize(("terminal", "written"), [(True, "a␛]0;title␇b\n\tc"), (False, ESCAPE + "\n\tc")])
def test_streamed_text_is_shown_on_a_terminal_and_raw_elsewhere(terminal: bool, written: str) -> None:
    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return terminal

    stream = Stream()
    print(ESCAPE, end="\n\tc", file=OnTerminal(stream), flush=True)
    assert stream.getvalue() == written
