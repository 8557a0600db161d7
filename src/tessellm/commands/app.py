"""All commands as one app: parse, call. Knows neither signals nor streams: cli.py does."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .. import __version__
from ..errors import nearest, quoted
from .bench import bench
from .change import add, remove
from .chat import chat
from .compose import compose
from .demo import demo
from .diagnose import diagnose
from .evaluate import evaluate
from .generate import generate
from .inspect import inspect
from .interruption import ctrl_c, interrupted
from .options import GroupedHelp, spread
from .outputs import check_outputs
from .plugins import LAB, load_plugin, plugin_names
from .route import route
from .serve import serve
from .tune import tune

SETTINGS = {"help_option_names": ["-h", "--help"]}
NO_CHOICE = re.compile(r"(?:Value error, )?'(.*)' is not one of ('.*')\.")  # as typer says it


class Commands(TyperGroup):
    """Tells of a Ctrl-C, which typer would end at without a word. Other distributions may add commands."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *plugin_names()]

    def get_command(self, ctx: Any, name: str) -> Any:
        known = super().get_command(ctx, name)
        if known is None and (name in LAB or name in plugin_names()):
            return _as_command(load_plugin(name))
        return known

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
        check_outputs(ctx.params)
        return super().invoke(ctx)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings=SETTINGS,
)
for command in (demo, compose, add, remove, inspect, route, generate, chat, diagnose, tune, evaluate, bench, serve):
    app.command(cls=Command)(spread(command))


def _as_command(function: Callable[..., Any]) -> Any:
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    alone.command(cls=Command, context_settings=SETTINGS)(spread(function))
    return typer.main.get_command(alone)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"tessellm {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show it.")] = False,
) -> None:
    """Compose language models that share a base, at decoding time, without training."""
