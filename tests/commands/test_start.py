"""The command line begins at once: no library is imported before a command runs; Ctrl-C is one line from then on."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import tessellm

LIBRARIES = ["torch", "transformers", "numpy", "safetensors"]
USAGE = {
    "--help": 0,
    "--version": 0,
    "": 2,
    "generate --help": 0,
    "tune -h": 0,
    "conpose": 2,
    "generate": 2,
    "generate out hi --nope": 2,
    "generate out hi --max-new-tokens 0": 2,
    "bench": 2,
    "tune out": 2,
    "inspect out --context 3": 2,
}
START = "import sys; from tessellm.cli import main; print('started', flush=True); main()"


@pytest.mark.parametrize("arguments", USAGE)
def test_help_and_errors_of_usage_import_no_library(arguments: str) -> None:
    code = f"""
import sys
from tessellm.cli import main
try:
    main()
except SystemExit as end:
    print(end.code, *({LIBRARIES} & sys.modules.keys()))
"""
    start = time.perf_counter()
    ran = subprocess.run([sys.executable, "-c", code, *arguments.split()], capture_output=True, text=True, timeout=60)
    assert ran.stdout.splitlines()[-1] == str(USAGE[arguments]), ran.stderr
    assert time.perf_counter() - start < 10  # a loose bound: benchmarks/import_time.py measures


def test_the_version(cli) -> None:
    assert cli("--version").out == f"tessellm {tessellm.__version__}\n"


def hears_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a background job's children do not


@pytest.fixture(scope="module")
def recipe(members_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipes") / "recipe.yaml"
    path.write_text(f"base: {members_dir / 'base'}\nexperts: {{math: {members_dir / 'math'}}}\n")
    return path


@pytest.mark.parametrize("seconds", [0.05, 0.5, 1, 2, 4])
def test_ctrl_c_is_one_line_whenever_it_comes(recipe: Path, seconds: float) -> None:
    command = [sys.executable, "-c", START, "generate", str(recipe), "-"]
    running = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=hears_ctrl_c
    )
    assert running.stdout is not None
    assert running.stdout.readline() == b"started\n"
    time.sleep(seconds)  # at last it waits for its prompt
    running.send_signal(signal.SIGINT)
    stdout, stderr = running.communicate(timeout=60)
    assert (stdout, stderr, running.returncode) == (b"", b"interrupted\n", 130)


@pytest.mark.parametrize("seconds", [0.1, 2])
def test_ctrl_c_on_a_terminal(recipe: Path, seconds: float) -> None:
    pid, terminal = pty.fork()
    if not pid:
        hears_ctrl_c()
        os.execv(sys.executable, [sys.executable, "-c", START, "generate", str(recipe), "-"])
    shown = b""
    while not shown.endswith(b"started\r\n"):
        shown += os.read(terminal, 100)
    time.sleep(seconds)
    os.write(terminal, b"\x03")
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 130
    assert os.read(terminal, 1000) == b"^C\r\ninterrupted\r\n"  # the first of it is the terminal's
    os.close(terminal)
