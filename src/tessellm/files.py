"""Writing so that nothing half-written is ever seen: to a temporary name first, then renamed."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import get_ident

from safetensors import SafetensorError

from .errors import CheckpointError


@contextmanager
def new_directory(target: Path, replaceable: Callable[[Path], bool]) -> Iterator[Path]:
    """A folder to write into, which becomes `target` when all went well and vanishes otherwise.

    A target that exists is replaced if it is empty or `replaceable` says so.
    """
    target = Path(os.path.realpath(target))  # a link stays, what it points to is replaced
    check_target(target, replaceable)
    scratch = target.parent / f".{target.name}.{os.getpid()}-{get_ident()}.tmp"
    made = [folder for folder in target.parents if not folder.exists()]
    try:
        scratch.mkdir(parents=True)
        _clear_leftovers(target)
        yield scratch
        _make_readable(scratch)
        _swap(scratch, target)
    except (OSError, SafetensorError) as error:  # safetensors raises its own, when the disk is full
        raise CheckpointError(f"{target} could not be written: {_reason(error)}. Nothing was changed") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        if not target.exists():
            _remove_empty(made)


def check_target(target: Path, replaceable: Callable[[Path], bool]) -> None:
    """Refuse a target that holds something else or cannot be written, before any work is done."""
    if target.exists() and not (target.is_dir() and (not any(target.iterdir()) or replaceable(target))):
        what = "holds something else" if target.is_dir() else "is a file"
        raise CheckpointError(f"{target} exists and {what}. Choose another name, or remove it")
    parent = next(folder for folder in Path(os.path.abspath(target)).parents if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        why = "that is a file" if not parent.is_dir() else "that folder may not be written to"
        raise CheckpointError(f"{target} cannot be made in {parent}: {why}. Choose another place")


def write_text(path: Path, text: str) -> None:
    """Write a file in one step."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}-{get_ident()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(path)
    except OSError as error:
        raise CheckpointError(f"{path} could not be written: {_reason(error)}") from error
    finally:
        with suppress(OSError):
            scratch.unlink(missing_ok=True)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split()).rstrip(".")


def _make_readable(folder: Path) -> None:
    """Give every file the usual permissions; safetensors makes files that only their owner can read."""
    umask = os.umask(0)
    os.umask(umask)
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o666 & ~umask)


def _swap(scratch: Path, target: Path) -> None:
    old = target.parent / f".{target.name}.{os.getpid()}-{get_ident()}.old.tmp"
    if target.exists():
        target.rename(old)
    try:
        scratch.rename(target)
    except OSError:
        if old.exists():
            old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _clear_leftovers(target: Path) -> None:
    """What killed processes left behind: half-written folders go, a folder that was being replaced comes back."""
    ours = re.compile(rf"\.{re.escape(target.name)}\.(\d+)(?:-\d+)?(\.old)?\.tmp")
    for leftover in list(target.parent.iterdir()):
        found = ours.fullmatch(leftover.name)
        if found is None or _is_running(int(found[1])):
            continue
        if leftover.name.endswith(".old.tmp") and not target.exists():
            leftover.rename(target)
        else:
            shutil.rmtree(leftover, ignore_errors=True)


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:
            return


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
