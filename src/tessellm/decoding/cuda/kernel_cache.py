"""Where compiled kernels are kept between runs: in the user's cache, unless the variables that torch and Triton read
say otherwise. Their own defaults are the folder for temporary files, which is emptied, and one per way of compiling."""

from __future__ import annotations

import os
from pathlib import Path

FOLDERS = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


def keep_kernels() -> None:
    """Tell torch and Triton, before either compiles."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tessellm"
    for variable, folder in FOLDERS.items():
        os.environ.setdefault(variable, str(cache / folder))
