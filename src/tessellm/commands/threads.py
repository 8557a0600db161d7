"""How many threads torch gets: as many as there are cores that nobody else uses when a command starts.

A thread without a core of its own holds up all others, which wait for it in every operation. Knows nothing of torch but
how to set it.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

VARIABLE = "TESSELLM_THREADS"
CPUS = Path("/sys/devices/system/cpu")
GROUPS = Path("/sys/fs/cgroup")


class Threads:
    """Watches, from when it is made, how many cores others use."""

    def __init__(self) -> None:
        self.cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
        self.asked = _asked()
        self.busy, self.own, self.start = self._busy_seconds(), time.process_time(), time.monotonic()

    def set(self) -> None:
        """Tell torch, unless the user has told OpenMP."""
        import torch

        if self.asked or "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(self.count())

    def count(self) -> int:
        """What the user asked for, else the cores that are free, at least one."""
        return self.asked or max(1, round(self.cores() - self.used_by_others()))

    def cores(self) -> float:
        """Physical cores that this process may use."""
        files = [CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list" for cpu in self.cpus]
        cores = {file.read_text() if file.exists() else file for file in files}
        return min(len(cores), _quota())

    def used_by_others(self) -> float:
        """Cores, on average since the watching began; by the load average where the system does not tell."""
        seconds, now = time.monotonic() - self.start, self._busy_seconds()
        if self.busy is None or now is None or not seconds:
            return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
        return max(0.0, (now - self.busy - (time.process_time() - self.own)) / seconds)

    def _busy_seconds(self) -> float | None:
        """Seconds that these processors have worked since the machine started."""
        try:
            lines = Path("/proc/stat").read_text().splitlines()
        except OSError:
            return None
        rows = {name: [int(field) for field in fields] for name, *fields in map(str.split, lines) if name[:3] == "cpu"}
        ticks = (sum(rows[f"cpu{cpu}"][:8]) - sum(rows[f"cpu{cpu}"][3:5]) for cpu in self.cpus)  # but idle, iowait
        return sum(ticks) / os.sysconf("SC_CLK_TCK")


def _asked() -> int | None:
    """What the user asked for, if anything."""
    asked = os.environ.get(VARIABLE)
    if not asked:
        return None
    if not asked.isdecimal() or not int(asked):
        from ..errors import EngineError

        raise EngineError(f"{VARIABLE}: expected a number of threads, such as 4; got {asked!r}")
    return int(asked)


def _quota() -> float:
    """Cores that the control groups of this process allow, by the strictest of them."""
    try:
        own = next(line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return float("inf")
    folder = GROUPS / own.strip("/")
    limits = [(each / "cpu.max") for each in (folder, *folder.parents) if each.is_relative_to(GROUPS)]
    found = [limit.read_text().split() for limit in limits if limit.exists()]
    return min((int(quota) / int(period) for quota, period in found if quota != "max"), default=float("inf"))
