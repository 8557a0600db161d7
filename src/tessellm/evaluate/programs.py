"""Run a program that nobody has read, confined (confined.py)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence

from ..errors import EngineError
from . import confined


def run_confined(
    program: Sequence[str], scratch: str, seconds: int, memory: int, env: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a program that may write in the folder `scratch` alone; an error where this system cannot confine it."""
    ran = subprocess.run(
        [sys.executable, confined.__file__, scratch, str(seconds), str(memory), *program],
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    if ran.returncode == confined.REFUSED:
        raise EngineError(
            "code that a model wrote runs only where it can be confined, and this system refuses: "
            f"{ran.stderr.strip()}. Use a Linux with user namespaces and Landlock"
        )
    return ran
