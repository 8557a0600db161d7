"""All commands as one app: parse, call. Knows neither signals nor streams: cli.py does."""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .. import __version__
from ..errors import nearest, quoted
from .bench import bench
from .compose import compose
from .demo import demo
from .diagnose import diagnose
from .evaluate import evaluate
from .generate import generate
from .inspect import inspect
from .interruption import ctrl_c, interrupted
from .options import GroupedHelp, spread
from .probe import probe
from .reproduce import reproduce
from .serve import serve
from .tune import tune

NO_CHOICE = re.compile(r"(?:Value error, )?'(.*)' is not one of ('.*')\.")  # as typer says it


class Commands(TyperGroup):
    """Tells of a Ctrl-C, which typer would end at without a word."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            interrupted(stop)


class Command(GroupedHelp):
    """Notes that it has begun, and names the word that a wrong choice is nearest to."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            if told := NO_CHOICE.fullmatch(error.message):
                given, known = told[1], re.findall(r"'([^']*)'", told[2])
                error.message = f"there is no {quoted(given)}; {nearest(given, known)}"
            raise

    def invoke(self, ctx: Any) -> Any:
        ctrl_c.begun = True
        return super().invoke(ctx)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (demo, compose, inspect, generate, diagnose, tune, evaluate, probe, bench, reproduce, serve):
    app.command(cls=Command)(spread(command))


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"tessellm {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show it.")] = False,
) -> None:
    """Compose language models that share a base, at decoding time, without training."""
