"""Files are written in one step or not at all, and what cannot be written is said before any work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from tessellm.errors import CheckpointError
from tessellm.files import check_file, write_figure, write_text


@pytest.mark.parametrize("name", ["new", "old", "deep/er/new", "link"])
def test_a_file_that_can_be_written_is_left_as_it_is_until_then(tmp_path: Path, name: str) -> None:
    (tmp_path / "old").write_text("before")
    (tmp_path / "link").symlink_to("old")
    listed = sorted(tmp_path.rglob("*"))
    check_file(tmp_path / name)
    assert sorted(tmp_path.rglob("*")) == listed
    assert (tmp_path / "old").read_text() == "before"
    write_text(tmp_path / name, "after")
    assert (tmp_path / name).read_text() == "after"
    assert (tmp_path / "link").is_symlink()
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize("path", ["folder", "file/new", "n" * 300, "no\0name", "/proc/none/new"])
def test_what_cannot_be_written_is_refused_at_once(tmp_path: Path, path: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="could not be written"):
        check_file(tmp_path / path)


def test_a_pipe_stays_a_pipe(tmp_path: Path) -> None:
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    check_file(pipe)
    write_text(pipe, "through")
    reader.join(timeout=10)
    assert read == ["through"]
    assert pipe.is_fifo()


KILLED = """
import os, signal, sys
from pathlib import Path
from matplotlib.figure import Figure
from tessellm.files import write_figure, write_text
Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
path = Path(sys.argv[1])
write_figure(Figure(), path) if path.suffix == ".png" else write_text(path, "half")
"""


@pytest.mark.parametrize("name", ["report.html", "table.png"])
def test_a_killed_process_leaves_the_old_file_and_the_next_one_clears_up(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    write_text(path, "before")
    ran = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False, timeout=120)
    assert ran.returncode == -signal.SIGKILL
    assert path.read_text() == "before"
    assert len(list(tmp_path.iterdir())) == 2
    write_text(path, "after")
    assert [each.name for each in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(("name", "start"), [("new/a.png", b"\x89PNG"), ("a.PDF", b"%PDF"), ("a.svg", b"<?xml")])
def test_a_figure_has_the_format_that_its_name_says(tmp_path: Path, name: str, start: bytes) -> None:
    write_figure(Figure(), tmp_path / name, dpi=20)
    assert (tmp_path / name).read_bytes().startswith(start)
    assert b"Matplotlib version" not in (tmp_path / name).read_bytes()


def test_every_figure_is_written_in_one_step() -> None:
    root = Path(__file__).parents[1]
    drawing = [
        path.relative_to(root).as_posix()
        for folder in ("src", "benchmarks", "docs", "examples")
        for path in (root / folder).rglob("*.py")
        if ".savefig(" in path.read_text(encoding="utf-8")
    ]
    assert drawing == ["src/tessellm/files.py"]
