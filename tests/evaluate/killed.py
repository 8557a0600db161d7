"""`tessellm evaluate`, killed again and again: python killed.py SEED KILLS OUT ARGUMENTS…

Runs once without a break in OUT/whole, then in OUT/killed with SIGKILL at random points until it ends by itself.
Every run is a fork of a process that has everything imported and nothing begun. Prints at how much of the work, in
lines and files written, each kill came.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import evalplus.evaluate  # noqa: F401
import lm_eval.evaluator  # noqa: F401
import torch

from tessellm.cli import main
from tessellm.evaluate import evaluation, harness, tasks  # noqa: F401


def work(folder: Path) -> int:
    """How much is written: files, and lines of journals."""
    while True:
        with suppress(FileNotFoundError):  # a folder that is renamed while it is listed
            files = [path for path in folder.rglob("*") if path.is_file()]
            return len(files) + sum(path.read_bytes().count(b"\n") for path in files if path.suffix == ".jsonl")


def start(arguments: list[str]) -> int:
    process = os.fork()
    if process == 0:
        torch.set_num_threads(1)
        tasks.GREEDY["max_gen_toks"] = 12
        sys.argv = ["tessellm", *arguments]
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        main()
        os._exit(0)
    return process


def ended(process: int) -> bool:
    found, status = os.waitpid(process, os.WNOHANG)
    if found and os.waitstatus_to_exitcode(status) not in (0, -signal.SIGKILL):
        sys.exit(f"a run ended with {os.waitstatus_to_exitcode(status)}")
    return bool(found)


def killed_at(point: int, delay: float, folder: Path, arguments: list[str]) -> int | None:
    """Start, and kill when so much is written; how much it was, or None if it ended before."""
    process = start(arguments)
    while not ended(process):
        if work(folder) >= point:
            time.sleep(delay)
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            return work(folder)
        time.sleep(0.01)
    return None


if __name__ == "__main__":
    seed, kills, out = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    generator = random.Random(seed)
    whole, killed = out / "whole", out / "killed"
    assert killed_at(sys.maxsize, 0, whole, [*sys.argv[4:], "-o", str(whole)]) is None
    total = work(whole)
    points = sorted(generator.randrange(total) for _ in range(kills))
    came = [killed_at(point, generator.uniform(0, 0.1), killed, [*sys.argv[4:], "-o", str(killed)]) for point in points]
    print(*(each for each in came if each is not None))
    assert killed_at(sys.maxsize, 0, killed, [*sys.argv[4:], "-o", str(killed)]) is None
