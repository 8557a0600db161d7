"""How many threads torch gets: cores that are free, never more than there are, or what the user says."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tessellm.commands import threads
from tessellm.commands.threads import Threads
from tessellm.errors import EngineError


@pytest.fixture(autouse=True)
def nobody_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(threads.VARIABLE)


def topology(folder: Path, siblings: list[str]) -> Path:
    for cpu, text in enumerate(siblings):
        (folder / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (folder / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(text)
    return folder


def test_threads_of_one_core_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "CPUS", topology(tmp_path, ["0,2", "1,3", "0,2", "1,3"]))
    monkeypatch.setattr(threads, "_quota", lambda: float("inf"))
    found = Threads()
    found.cpus = [0, 1, 2, 3]
    assert found.cores() == 2
    found.cpus = [0, 2]
    assert found.cores() == 1


@pytest.mark.parametrize(("used", "count"), [(0.0, 8), (0.4, 8), (3.2, 5), (7.9, 1), (20.0, 1)])
def test_what_others_use_is_left_to_them(monkeypatch: pytest.MonkeyPatch, used: float, count: int) -> None:
    monkeypatch.setattr(Threads, "cores", lambda self: 8)
    monkeypatch.setattr(Threads, "used_by_others", lambda self: used)
    assert Threads().count() == count


def spin() -> None:
    while True:
        pass


def test_work_of_others_is_seen_and_our_own_is_not() -> None:
    others = multiprocessing.get_context("fork").Process(target=spin, daemon=True)
    others.start()
    watching = Threads()
    end = time.monotonic() + 1
    while time.monotonic() < end:
        pass
    others.kill()
    others.join()
    assert 0.2 < watching.used_by_others() <= len(watching.cpus)


def test_the_quota_of_a_control_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "GROUPS", tmp_path)
    own = Path("/proc/self/cgroup")
    if not own.exists() or "0::" not in own.read_text():
        pytest.skip("no control groups of version 2")
    assert threads._quota() == float("inf")
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert threads._quota() == 1.5


@pytest.mark.parametrize("asked", ["0", "two", "-1"])
def test_a_number_is_asked_for(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    monkeypatch.setenv(threads.VARIABLE, asked)
    with pytest.raises(EngineError, match="TESSELLM_THREADS: expected a number of threads"):
        Threads()


def threads_of_torch(before: str, **variables: str) -> int:
    code = f"{before}\nimport torch; print(torch.get_num_threads())"
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"} | variables
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    return int(ran.stdout)


def test_torch_is_told_unless_openmp_was() -> None:
    tell = "from tessellm import when_imported; from tessellm.commands.threads import Threads\n"
    tell += "when_imported('torch', Threads().set)"
    assert threads_of_torch(tell, TESSELLM_THREADS="3") == 3
    assert threads_of_torch(tell, OMP_NUM_THREADS="2") == threads_of_torch("", OMP_NUM_THREADS="2")
