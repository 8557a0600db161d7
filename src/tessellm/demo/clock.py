"""What demos share: seconds of each phase, quiet loading, and which folder is a demo's."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import transformers


class Clock:
    """Seconds of every phase."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - start, 2)

    def report(self) -> dict[str, float]:
        return {**self.seconds, "total": round(time.perf_counter() - self.start, 2)}


@contextmanager
def no_loading_bars() -> Iterator[None]:
    """Keep transformers from drawing progress bars in here."""
    bars = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if bars:
            transformers.utils.logging.enable_progress_bar()


def is_demo(folder: Path) -> bool:
    """Whether a demo made the folder, so that another may replace it."""
    return (folder / "demo.json").is_file() and any((folder / part).is_dir() for part in ("members", "experts"))
