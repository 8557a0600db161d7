"""What a result was measured on: commit, versions, hardware. Every results file carries it."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch


def environment(*packages: str) -> dict[str, Any]:
    """Commit, versions and hardware; `packages` are those whose versions count beside the usual ones."""
    usual = {"python": platform.python_version(), "torch": torch.__version__}
    return {
        "commit": _commit(),
        "versions": {**usual, **{name: _version(name) for name in ("transformers", *packages)}},
        "hardware": torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()} CPU",
        "threads": torch.get_num_threads(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the source that runs, with + where files were changed since."""
    here = Path(__file__).parent
    try:
        head = _git("rev-parse", "HEAD", folder=here)
        return head + ("+" if _git("status", "--porcelain", "--", ".", folder=here) else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*arguments: str, folder: Path) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
