"""Ctrl-C in one line, whenever it comes. Imports nothing, so that it works before anything else is imported."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import Any, NoReturn

CODE = 128 + signal.SIGINT
HERE = os.path.dirname(__file__)


class CtrlC:
    """What SIGINT does. Until a command has begun, and while it imports what it needs, the process ends at once:
    libraries may swallow an exception there, and nothing is half-written yet. Later a KeyboardInterrupt lets the work
    clear up after itself."""

    begun = False  # whether a command runs
    pressed = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self.begun or importing(frame):
            _say()
            os._exit(CODE)
        self.pressed = True
        sys.unraisablehook = lambda unraisable: None  # what was cut off in a destructor is not worth a traceback
        raise KeyboardInterrupt


ctrl_c = CtrlC()


def hear_ctrl_c() -> None:
    """From now on. Background jobs, which ignore it, still do."""
    ctrl_c.begun = ctrl_c.pressed = False
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, ctrl_c)


def importing(frame: FrameType | None) -> bool:
    """Whether a command is importing a module: itself, not something that it has called."""
    importer = None
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            importer = frame.f_back
        frame = frame.f_back
    file = importer.f_code.co_filename if importer is not None else ""
    return os.path.dirname(file) == HERE


def interrupted(stop: Any) -> NoReturn:
    """Say that it was stopped and, where the work can go on, from where."""
    _say(*getattr(stop, "__notes__", ()))
    sys.exit(CODE)


def _say(*notes: str) -> None:
    line = "; ".join(["interrupted", *notes]) + "\n"
    if sys.stderr.isatty():
        line = "\n" + line  # the terminal has shown ^C
    print(line, end="", file=sys.stderr, flush=True)
