"""Folders that experiments fill: made before the work, gone again if nothing came of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tessellm.errors import CheckpointError


@contextmanager
def results_folder(folder: Path) -> Iterator[None]:
    """The folder is there; what of it had to be made goes again if something goes wrong before anything is in it."""
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        with suppress(OSError):
            for each in made:
                each.rmdir()
        raise


def state_folder(folder: Path) -> None:
    """The folder is there, for what one call leaves to the next."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(f"{folder} cannot be a folder: {reason}. Remove it, or choose another") from error
