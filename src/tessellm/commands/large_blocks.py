"""Large blocks of memory stay with the process. glibc asks the system for every block above 32 MB and gives it back
when it is freed, so that the logits of a prompt's rows are new pages each time: some percent of what reading it takes.

A server gives back what nobody used for a while (serve/freed_memory.py). Knows nothing of torch.
"""

from __future__ import annotations

import ctypes
import os
import sys

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # as malloc.h numbers them
KEPT = 1 << 30  # bytes; larger blocks come and go as before


def keep_large_blocks() -> None:
    """Tell the C library, where it is glibc and the user has not told it otherwise."""
    tell = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    told = "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or any("MALLOC_" in name for name in os.environ)
    if tell is not None and not told:
        for parameter in (MMAP_THRESHOLD, TRIM_THRESHOLD):
            tell(parameter, KEPT)
