"""Where compiled kernels are kept between runs: in the user's cache, unless the variables that torch and Triton read
say otherwise. Their own defaults are the folder for temporary files, which is emptied, and one per way of compiling."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

FOLDERS = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


def keep_kernels() -> None:
    """Tell torch and Triton, before either compiles; leave it to them where nothing can be written."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tessellm"
    for variable in FOLDERS.keys() - os.environ.keys():
        with suppress(OSError):
            (cache / FOLDERS[variable]).mkdir(parents=True, exist_ok=True)
            os.environ[variable] = str(cache / FOLDERS[variable])
