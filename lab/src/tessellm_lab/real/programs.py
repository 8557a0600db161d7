"""Programs that nobody has read, each run once, confined: which of them came to their end."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tessellm.errors import EngineError
from tessellm.evaluate.programs import run_confined

MEMORY = 4 << 30  # address space of one program
RUNNER = """import json, subprocess, sys
from concurrent.futures import ThreadPoolExecutor
count, workers, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
def code(number):
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    try:
        return subprocess.run([sys.executable, "-I", f"{number}.py"], timeout=seconds, **quiet).returncode
    except subprocess.TimeoutExpired:
        return None
with ThreadPoolExecutor(workers) as pool:
    json.dump(list(pool.map(code, range(count))), open("codes.json", "w"))
"""


def exit_codes(programs: Sequence[str], seconds: float = 5.0, workers: int | None = None) -> list[int | None]:
    """Run Python programs without network or files of the user's, several at a time; None: it did not end in time."""
    if not programs:
        return []
    workers = workers or os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as scratch:
        for number, text in enumerate(programs):
            Path(scratch, f"{number}.py").write_text(text, encoding="utf-8", errors="replace")
        runner = [sys.executable, "-c", RUNNER, str(len(programs)), str(workers), str(seconds)]
        env = {"PATH": os.environ.get("PATH", ""), "HOME": scratch, "TMPDIR": scratch, "OMP_NUM_THREADS": "1"}
        ran = run_confined(runner, scratch, round(120 + seconds * len(programs)), MEMORY, env)
        found = Path(scratch, "codes.json")
        if ran.returncode or not found.is_file():
            raise EngineError(f"programs could not be run (exit code {ran.returncode}): {ran.stderr.strip()[-300:]}")
        return json.loads(found.read_text(encoding="utf-8"))
