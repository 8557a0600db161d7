"""The command line's entry: signals, streams, exit codes.

Exit codes: 0 done, 1 did not hold or failed, 2 bad usage, 130 Ctrl-C. Imports nothing heavy: the libraries come when a
command runs.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
from errno import ENAMETOOLONG
from typing import NoReturn

from . import when_imported
from .commands.interruption import ctrl_c, hear_ctrl_c, interrupted
from .commands.large_blocks import keep_large_blocks
from .commands.streams import abandon_stdout, is_of_stdout, prepare_streams
from .commands.threads import Threads

GARBAGE = 100_000  # objects between two looks for garbage: the libraries' imports make a million of them and leave none


def main() -> None:
    """Run a command. Errors of ours become one message and exit code 2."""
    gc.set_threshold(GARBAGE)
    atexit.register(_leave)
    hear_ctrl_c()
    before = signal.signal(signal.SIGTERM, _ended)
    prepare_streams()
    try:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        when_imported("transformers", _be_quiet)
        when_imported("torch", Threads().set)
        when_imported("torch", keep_large_blocks)
        _run()
    except (Exception, KeyboardInterrupt) as error:
        _explain(error)
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is done: nothing is left to interrupt


def _run() -> None:
    from .commands.app import app

    try:
        app()
    except SystemExit:
        sys.stdout.flush()  # which may fail
        raise


def _explain(error: BaseException) -> NoReturn:
    """Say what happened, and exit."""
    from .errors import TessellmError

    if ctrl_c.pressed or isinstance(error, KeyboardInterrupt):  # which a library may have turned into another
        interrupted(error)
    if isinstance(error, TessellmError):
        _say_error(str(error))
        sys.exit(2)
    if isinstance(error, OSError):
        _explain_file(error)
    raise error


def _explain_file(error: OSError) -> None:
    """Say what is wrong with standard output, or with a name that no file can have, and exit; else go on."""
    if isinstance(error, BrokenPipeError):
        abandon_stdout()
        sys.exit(1)
    if is_of_stdout(error):
        abandon_stdout()
        _say_error(f"standard output could not be written: {error.strerror}")
        sys.exit(1)
    if error.errno == ENAMETOOLONG:
        name = str(error.filename)
        _say_error(f"no file or folder has a name of {len(name):,} characters: {name[:40]}…. Choose a shorter one")
        sys.exit(2)


def _say_error(text: str) -> None:
    from rich.markup import escape

    from .commands.shared import err

    err.print(f"[bold red]error:[/bold red] {escape(text)}", soft_wrap=True)


def _be_quiet() -> None:
    """No progress bars of the libraries' where nobody watches, and none of their warnings: errors are ours to word."""
    import logging

    import huggingface_hub.utils
    import transformers.utils.logging

    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
        huggingface_hub.utils.disable_progress_bars()


def _leave() -> None:
    """What is left goes with the process: the interpreter need not look through it for garbage at its end."""
    if "triton" not in sys.modules:  # whose bindings would call it a leak
        gc.freeze()


def _ended(number: int, _: object) -> None:
    """Told to end: what was being written is cleared away on the way out."""
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
