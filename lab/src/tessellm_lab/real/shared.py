"""One journal that several processes fill: each takes what the journal lacks and no other process is at.

A process that dies lets go of what it had taken: claims are locks on files, which the system gives back.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tessellm.evaluate.journal import Entry, Journal


class SharedJournal(Journal):
    """A journal whose file other processes may be adding to."""

    def __init__(self, path: Path):
        self._claims = path.with_suffix(".claims")
        self._claims.mkdir(parents=True, exist_ok=True)
        self._known = 0  # bytes of the file that were read
        with self._locked("journal"):
            super().__init__(path)
            self._known = path.stat().st_size if path.exists() else 0

    def add(self, key: str, **content: Any) -> Entry:
        with self._locked("journal"):
            return super().add(key, **content)

    def refresh(self) -> None:
        """Read what others have added."""
        assert self.path is not None
        if not self.path.exists():
            return
        with self._locked("journal"), self.path.open("rb") as file:
            file.seek(self._known)
            for number, line in enumerate(file.read().splitlines(), 1):
                self._read(line, number)
            self._known = file.tell()

    @contextmanager
    def taken(self, key: str) -> Iterator[bool]:
        """Take a piece of work by its name for the time of the block; False where another process has it."""
        with (self._claims / key).open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            self.refresh()
            yield True

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        with (self._claims / name).open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
