"""Journal: what was computed so far, one JSON line per problem, appended as it ends. A run that was killed goes on.

A line that was cut off while it was written is forgotten, and its problem computed again.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from ..errors import CheckpointError


def key_of(*parts: Any) -> str:
    """A name for a problem: the same for equal content, in every process."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


class Entry(dict[str, Any]):
    """What came of one problem. Asked for what is not there, it says that the journal is not one of today's."""

    def __init__(self, content: dict[str, Any], path: Path | None):
        super().__init__(content)
        self.path = path

    def __missing__(self, name: str) -> Any:
        raise CheckpointError(
            f"{self.path}: an entry lacks {name!r}. It is damaged or another version's; remove the file to start anew"
        )


class Journal:
    """A mapping from keys to entries that outlives the process; without a path, one that does not."""

    def __init__(self, path: Path | None = None):
        self.path = path
        self.entries: dict[str, Entry] = {}
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            content = path.read_bytes() if path.exists() else b""
            whole = content[: content.rfind(b"\n") + 1]
            if whole != content:
                os.truncate(path, len(whole))
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read or written: {error.strerror}") from error
        for number, line in enumerate(whole.splitlines(), 1):
            self._read(line, number)

    def _read(self, line: bytes, number: int) -> None:
        try:
            content = json.loads(line)
            self.entries[content["key"]] = Entry(content, self.path)
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{self.path}, line {number} is damaged. Remove that line, or the file to start anew"
            ) from error

    def __contains__(self, key: str) -> bool:
        return key in self.entries

    def __getitem__(self, key: str) -> Entry:
        return self.entries[key]

    def __len__(self) -> int:
        return len(self.entries)

    def add(self, key: str, **content: Any) -> Entry:
        """Note what came of a problem: on the disk first, then here."""
        entry = Entry({"key": key, **content}, self.path)
        if self.path is not None:
            try:
                with self.path.open("ab") as file:
                    file.write(json.dumps(entry, ensure_ascii=False).encode() + b"\n")
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as error:
                raise CheckpointError(f"{self.path} could not be written: {error.strerror}") from error
        self.entries[key] = entry
        return entry
