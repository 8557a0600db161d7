"""What a linked member's files were when it was composed, so that a member which has changed is noticed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..members import sources


@dataclass(frozen=True)
class Stamp:
    """Quick to compare if the files are untouched, exact if not."""

    sha256: str
    files: list  # [bytes, changed_ns] of each, as JSON keeps it

    @classmethod
    def of(cls, files: list[Path]) -> Stamp:
        return cls(sources.digest(files), cls.quick(files))

    @staticmethod
    def quick(files: list[Path]) -> list[list[int]]:
        return [[file.stat().st_size, file.stat().st_mtime_ns] for file in files]

    def matches(self, files: list[Path]) -> bool:
        return self.files == self.quick(files) or self.sha256 == sources.digest(files)


def telling_files(source: sources.Source) -> list[Path]:
    """The files that make a member what it is: its weights, and how they are to be read."""
    if source.file is not None:
        return [source.path]
    configs = (source.directory / name for name in ("config.json", "adapter_config.json"))
    return [*sources.weight_files(source.directory), *(path for path in configs if path.is_file())]
