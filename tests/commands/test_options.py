"""Options in groups: typer reads them as options, the command gets dataclasses, help shows headings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer.testing import CliRunner

from tessellm.commands.options import GroupedHelp, spread


@dataclass(frozen=True)
class Colours:
    """How it is painted."""

    red: Annotated[int, typer.Option(min=0, help="How red.")] = 1
    name: Annotated[str, typer.Option("--name", "-n")] = "plain"


def paint(wall: Annotated[str, typer.Argument()], *, colours: Colours, coats: int = 2) -> None:
    typer.echo(f"{wall} {colours} {coats}")


def test_a_group_is_spread_and_put_together_again() -> None:
    app = typer.Typer(rich_markup_mode=None)
    app.command(cls=GroupedHelp)(spread(paint))
    found = CliRunner().invoke(app, ["north", "-n", "dots", "--coats", "3"])
    assert found.output == "north Colours(red=1, name='dots') 3\n"
    assert CliRunner().invoke(app, ["north", "--red", "-1"]).exit_code == 2


def test_help_shows_a_heading_for_every_group(cli: Callable[..., Any]) -> None:
    shown = cli("tune", "--help").out
    judge, keep = shown.index("To judge what was found"), shown.index("To keep what was found:")
    assert judge < shown.index("--held-out") < keep < shown.rindex("--save")


def test_a_wrong_choice_gets_the_nearest_word(cli: Callable[..., Any]) -> None:
    ran = cli("generate", "out", "hi", "--engine", "referense")
    assert ran.code == 2
    message = "Invalid value for '--engine': there is no 'referense'; did you mean 'reference'? Known: auto, reference"
    assert message in " ".join(ran.err.split())
