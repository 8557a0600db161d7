"""What the commands share: consoles, options, how a model is loaded and a result written."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from ..text.visible import visible

LINE_SECONDS = 10.0  # between lines on how far long work is


class SafeConsole(Console):
    """A console whose terminal shows the control characters of a text and does nothing else with them."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(visible(text) if self.is_terminal else text, **options)


out, err = SafeConsole(highlight=False, emoji=False), SafeConsole(stderr=True, highlight=False, emoji=False)

PLAIN: Any = {"box": SIMPLE_HEAD, "pad_edge": False, "show_edge": False}  # how tables look
NARROW: Any = {**PLAIN, "padding": (0, 1, 0, 0)}  # those with many columns


def writable(path: Path | None) -> Path | None:
    """A file that will be written when the work is done: said now if it cannot be."""
    if path is not None:
        from ..files import check_file

        check_file(path)
    return path


JsonPath = Annotated[Path | None, typer.Option("--json", callback=writable, help="Also write the result to this file.")]
MODEL = "A composition's folder or hub id, a recipe, or a folder of adapters"
ModelPath = Annotated[str, typer.Argument(metavar="MODEL", help=f"{MODEL}.")]
SpeakerPath = Annotated[str, typer.Argument(metavar="MODEL", help=f"{MODEL}; MODEL:MEMBER: one member.")]
Device = Annotated[str | None, typer.Option(help="Where members run: cpu, cuda, cuda:1, auto, …")]
SEEDS: Any = {"min": 0, "max": 2**32 - 1}  # past these, torch draws what it draws for another seed
Seed = Annotated[int, typer.Option(**SEEDS)]
Dtype = Annotated[
    str | None, typer.Option(help="float32, bfloat16, float16, or, on a CPU, int8 or int4; as stored if not given.")
]


@dataclass(frozen=True)
class Placement:
    """Where the members run"""

    device: Device = None
    dtype: Dtype = None


class Shown:
    """Shows how far long work is: a bar on a terminal, elsewhere a line now and then. Called with how much is done, of
    how much; ends with all of it, or with `close`."""

    def __init__(self, what: str):
        self.what = what
        self._bar: Progress | None = None
        self._first: tuple[float, int] | None = None  # when it was called first, and how much was done then
        self._last = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        began, before = self._first = self._first or (time.monotonic(), done)
        if err.is_terminal:
            self._draw(done, total)
        elif time.monotonic() - self._last >= LINE_SECONDS and before < done < total:
            self._last = time.monotonic()
            left = (self._last - began) / (done - before) * (total - done)
            err.print(f"{self.what}: {done} of {total}, {readable_seconds(left)} left", soft_wrap=True)

    def _draw(self, done: int, total: int) -> None:
        if self._bar is None:
            self._bar = Progress(console=err, transient=True, redirect_stdout=False)
            self._bar.add_task(self.what, total=total)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=done, total=total)
        if done == total:
            self.close()

    def close(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __enter__(self) -> Shown:
        return self

    __exit__ = close


def calibration_progress() -> Shown:
    """Return what shows how far calibrating a router is, once it has begun."""
    return Shown("calibrating the router")


def readable_seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def readable_size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}" if count < 999.5 else f"{count:,.0f} {unit}"
        count /= 1024
    return f"{count:,.1f} GiB"


def write_json(path: Path | None, content: Any) -> None:
    from ..files import write_text

    if path is not None:
        write_text(path, json.dumps(content, indent=2, ensure_ascii=False, default=str) + "\n")


def words(text: str) -> tuple[str, ...]:
    """What stands between commas."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def numbers(text: str, option: str) -> tuple[float, ...]:
    """Numbers between commas."""
    from ..errors import RecipeError

    try:
        found = tuple(map(float, words(text)))
    except ValueError:
        found = (math.nan,)
    if not all(map(math.isfinite, found)):
        raise RecipeError(f"{option}: expected numbers with commas between them, such as 0.5,1; got {text!r}")
    return found


def on_command_line(given: typer.Context, names: Iterable[str]) -> list[str]:
    """Those of these options that the user wrote."""
    sources = {name: given.get_parameter_source(name) for name in names}
    return [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]


def as_option(name: str) -> str:
    return "--" + name.replace("_", "-")
