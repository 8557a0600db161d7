"""The command line: parse, call, print. Exit codes: 0 done, 1 did not hold or failed, 2 bad usage, 130 Ctrl-C."""

from __future__ import annotations

import logging
import os
import signal
import sys
from typing import Any, NoReturn

import typer
from rich.markup import escape
from typer.core import TyperGroup

from .commands.bench import bench
from .commands.compose import compose
from .commands.demo import demo
from .commands.diagnose import diagnose
from .commands.evaluate import evaluate
from .commands.generate import generate
from .commands.inspect import inspect
from .commands.probe import probe
from .commands.reproduce import reproduce
from .commands.serve import serve
from .commands.shared import err
from .commands.tune import tune
from .errors import TessellmError


class Commands(TyperGroup):
    """Tells of a Ctrl-C, which typer would end at without a word."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            _interrupted(stop)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (demo, compose, inspect, generate, diagnose, tune, evaluate, probe, bench, reproduce, serve):
    app.command()(command)


@app.callback()
def _options() -> None:
    """Compose language models that share a base, at decoding time, without training."""


def _be_quiet() -> None:
    """No progress bars of the libraries' where nobody watches, and none of their warnings: errors are ours to word."""
    import huggingface_hub.utils
    import transformers.utils.logging

    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
        huggingface_hub.utils.disable_progress_bars()


def _ended(number: int, _: object) -> None:
    """Told to end: what was being written is cleared away on the way out."""
    sys.exit(128 + number)


def _interrupted(stop: KeyboardInterrupt) -> NoReturn:
    """One line: that it was stopped and, where the work can go on, from where."""
    if err.is_terminal:
        err.print()  # the terminal has shown ^C
    err.print("; ".join(["interrupted", *getattr(stop, "__notes__", ())]), markup=False, soft_wrap=True)
    sys.exit(128 + signal.SIGINT)


def main() -> None:
    """The entry point: errors of ours become one message and exit code 2."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    before = signal.signal(signal.SIGTERM, _ended)
    try:
        _be_quiet()
        app()
    except KeyboardInterrupt as stop:
        _interrupted(stop)
    except TessellmError as error:
        err.print(f"[bold red]error:[/bold red] {escape(str(error))}", soft_wrap=True)
        sys.exit(2)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    main()
