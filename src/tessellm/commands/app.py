"""All commands as one app: parse, call. Knows neither signals nor streams: cli.py does."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .. import __version__
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


class Commands(TyperGroup):
    """Tells of a Ctrl-C, which typer would end at without a word."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            interrupted(stop)


class Command(GroupedHelp):
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
