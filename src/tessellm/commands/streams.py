"""Standard streams that take any text: on terminals of any encoding, closed, on a full disk.

Knows nothing of what is written."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import TextIO

NO_ROOM = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO}
NARROWEST = 20  # columns: a terminal that says fewer does not know


def prepare_streams() -> None:
    """Never fail for a character that the encoding lacks, a stream that is closed, or a width of nothing."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by whoever started this
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
    columns = os.environ.get("COLUMNS", "")
    if columns.isdigit() and int(columns) < NARROWEST:
        del os.environ["COLUMNS"]


def is_of_stdout(error: OSError) -> bool:
    """Whether it was standard output that could not be written: it has no name, unlike any file; errors of
    files.py are worded there."""
    return error.filename is None and error.errno in NO_ROOM


def abandon_stdout() -> None:
    """Drop what standard output could not take, or Python would complain of it at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class OnTerminal(io.TextIOBase):
    """A stream for text of any origin: a terminal shows its control characters, elsewhere it is written as it is."""

    def __init__(self, stream: TextIO):
        self.stream = stream

    def write(self, text: str) -> int:
        from ..text.visible import visible

        return self.stream.write(visible(text) if self.stream.isatty() else text)

    def flush(self) -> None:
        self.stream.flush()
