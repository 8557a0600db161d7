"""Writing so that nothing half-written is ever seen: to a temporary name first, then renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import CheckpointError


@contextmanager
def new_directory(target: Path, replaceable: Callable[[Path], bool]) -> Iterator[Path]:
    """A folder to write into, which becomes `target` when all went well and vanishes otherwise.

    A target that exists is replaced if it is empty or `replaceable` says so.
    """
    target = Path(os.path.abspath(target))
    check_target(target, replaceable)
    _remove_leftovers(target)
    scratch = target.parent / f".{target.name}.{os.getpid()}.tmp"
    try:
        scratch.mkdir(parents=True)
        yield scratch
        _swap(scratch, target)
    except OSError as error:
        raise CheckpointError(
            f"{target} could not be written: {error.strerror or error}. Nothing was changed"
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def check_target(target: Path, replaceable: Callable[[Path], bool]) -> None:
    """Refuse a target that holds something else, before any work is done."""
    if target.exists() and not (target.is_dir() and (not any(target.iterdir()) or replaceable(target))):
        raise CheckpointError(
            f"{target} exists and is not a composition that could be replaced. Choose another name, or remove it first"
        )


def write_text(path: Path, text: str) -> None:
    """Write a file in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def _swap(scratch: Path, target: Path) -> None:
    old = target.parent / f".{target.name}.{os.getpid()}.old.tmp"
    if target.exists():
        target.rename(old)
    scratch.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _remove_leftovers(target: Path) -> None:
    """What killed processes left behind."""
    for leftover in target.parent.glob(f".{target.name}.*.tmp"):
        owner = leftover.name.removeprefix(f".{target.name}.").split(".")[0]
        if owner.isdigit() and int(owner) != os.getpid() and not _is_running(int(owner)):
            shutil.rmtree(leftover, ignore_errors=True)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
