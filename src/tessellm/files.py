"""Writing so that nothing half-written is ever seen: to a temporary name first, then renamed."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from errno import EISDIR
from pathlib import Path
from threading import get_ident
from typing import Any

from safetensors import SafetensorError

from .errors import CheckpointError

AT_FDCWD, EXCHANGE = -100, 2  # of renameat2


@contextmanager
def new_directory(target: Path, replaceable: Callable[[Path], bool]) -> Iterator[Path]:
    """A folder to write into, which becomes `target` when all went well and vanishes otherwise.

    A target that exists is replaced if it is empty or `replaceable` says so.
    """
    target = Path(os.path.realpath(target))  # a link stays, what it points to is replaced
    check_target(target, replaceable)
    scratch = _scratch(target)
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
        why = "that is a file" if not parent.is_dir() else "that folder is not writable"
        raise CheckpointError(f"{target} cannot be made in {parent}: {why}. Choose another place")


@contextmanager
def going_on(folder: Path | None) -> Iterator[None]:
    """What is done in here is kept in the folder as it comes: a Ctrl-C says so."""
    try:
        yield
    except KeyboardInterrupt as stop:
        if folder is not None and any(path.is_file() and path.stat().st_size for path in folder.rglob("*")):
            stop.add_note(f"what is done is kept in {folder}: run the same command again to go on")
        raise


def check_file(path: Path) -> None:
    """Refuse a file that cannot be written, before any work is done. What is there stays as it is."""
    try:
        if path.is_dir():
            raise IsADirectoryError(EISDIR, "it is a folder")
        if not _is_device(path):
            target = Path(os.path.realpath(path))
            parent = next(folder for folder in target.parents if folder.exists())
            trial = _scratch(parent / target.name)
            trial.touch()
            trial.unlink()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} could not be written: {_reason(error)}. Choose another place") from error


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A name to write to, which becomes `path` when all went well and vanishes otherwise; a device or a pipe, which
    cannot be replaced, is yielded as it is."""
    scratch = None
    try:
        if _is_device(path):
            yield path
            return
        target = Path(os.path.realpath(path))  # a link stays
        target.parent.mkdir(parents=True, exist_ok=True)
        _clear_leftovers(target)
        scratch = _scratch(target)
        yield scratch
        scratch.replace(target)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} could not be written: {_reason(error)}") from error
    finally:
        if scratch is not None:
            with suppress(OSError):
                scratch.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a file in one step."""
    with new_file(path) as file:
        file.write_text(text, encoding="utf-8")


def write_figure(figure: Any, path: Path, **options: Any) -> None:
    """A matplotlib figure, in the format that the name ends with; without the version that drew it, so that the same
    picture is the same file."""
    kind = path.suffix.removeprefix(".").lower()
    with new_file(path) as file:
        figure.savefig(file, format=kind, metadata={"Software": None} if kind == "png" else None, **options)


@contextmanager
def stored(path: Path, fix: str = "Remove it to make it anew") -> Iterator[None]:
    """What an earlier run left is read here: where it cannot be, the error says what to do about it."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(f"{path} is damaged, or another version's. {fix}") from error


def _is_device(path: Path) -> bool:
    """/dev/stdout and its like, pipes: there, and neither a file nor a folder."""
    return path.exists() and not path.is_file() and not path.is_dir()


def _scratch(target: Path, kind: str = "") -> Path:
    return target.with_name(f".{target.name}.{os.getpid()}-{get_ident()}{kind}.tmp")


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
    """Put a folder in the place of another. Where the system cannot exchange the two in one step, `_clear_leftovers`
    mends what a process killed between two steps left."""
    old = _scratch(target, ".old")
    if target.exists():
        if _exchanged(scratch, target):
            return
        target.rename(old)
    try:
        scratch.rename(target)
    except OSError:
        if old.exists():
            old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _exchanged(one: Path, other: Path) -> bool:
    """Exchange two folders in one step, where the system can (Linux: renameat2)."""
    exchange = getattr(ctypes.CDLL(None), "renameat2", None) if os.name == "posix" else None
    return exchange is not None and exchange(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), EXCHANGE) == 0


def _clear_leftovers(target: Path) -> None:
    """What killed processes left behind: what is half-written goes, a folder that was being replaced comes back."""
    ours = re.compile(rf"\.{re.escape(target.name)}\.(\d+)(?:-\d+)?(\.old)?\.tmp")
    for leftover in list(target.parent.iterdir()):
        found = ours.fullmatch(leftover.name)
        if found is None or _is_running(int(found[1])):
            continue
        if leftover.name.endswith(".old.tmp") and not target.exists():
            leftover.rename(target)
        elif leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


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
