"""Several processes give what one does, and a Ctrl-C ends them at once and without a word."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from operator import floordiv

import pytest

from tessellm_lab.common.workers import by_processes

ASLEEP = """
import sys, time
from tessellm_lab.common.workers import by_processes
print("begun", flush=True)
try:
    for _ in by_processes(time.sleep, [(0.01,)] + [(100,)] * 8, 2):
        print("at work", flush=True)
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_jobs_come_back_in_order_and_errors_too() -> None:
    jobs = [(number, 2) for number in range(5)]
    assert list(by_processes(floordiv, jobs, 2)) == list(by_processes(floordiv, jobs, 1)) == [0, 0, 1, 1, 2]
    with pytest.raises(ZeroDivisionError):
        list(by_processes(floordiv, [(1, 0), (1, 1)], 2))


@pytest.mark.parametrize("said", ["begun", "at work"])
def test_ctrl_c_ends_them_at_once_and_without_a_word(said: str) -> None:
    def on_its_own() -> None:
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a background job's children do not hear it

    running = subprocess.Popen(
        [sys.executable, "-c", ASLEEP], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=on_its_own
    )
    assert running.stdout is not None
    while said not in next(running.stdout):
        pass
    time.sleep(0.5)  # the processes start, or are asleep
    os.killpg(running.pid, signal.SIGINT)  # as a terminal does: to every process
    _, stderr = running.communicate(timeout=50)  # until the last of them is gone
    assert (stderr, running.returncode) == ("", 130)
