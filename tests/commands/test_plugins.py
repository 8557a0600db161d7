"""Commands of other distributions: by entry points, and what is said where the lab is not installed."""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer

from tessellm.commands import plugins


def install(monkeypatch: pytest.MonkeyPatch, *points: EntryPoint) -> None:
    monkeypatch.setattr(plugins, "entry_points", lambda **wanted: EntryPoints(points).select(**wanted))


def shout(text: Annotated[str, typer.Argument(metavar="TEXT")], *, times: Annotated[int, typer.Option()] = 1) -> None:
    """Say it louder. Example: tessellm shout hi"""
    typer.echo(text.upper() * times)


def letters(out: Path, console: Any) -> dict[str, str]:
    return {"out": out.name}


def test_a_command_that_is_registered_is_listed_and_runs(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, EntryPoint("shout", f"{__name__}:shout", plugins.COMMANDS))
    assert "shout" in cli("--help").out
    assert cli("shout", "hi", "--times", "2").out == "HIHI\n"
    assert "Example: tessellm shout hi" in cli("shout", "--help").out
    refused = cli("shout", "hi", "--time", "x")
    assert refused.code == 2
    assert "Usage: tessellm shout" in refused.err


def test_a_demo_that_is_registered_runs(cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, EntryPoint("letters", f"{__name__}:letters", plugins.DEMOS))
    assert cli("demo", "letters", "--out", "made", "--json", tmp_path / "out.json").code == 0
    assert '"out": "made"' in (tmp_path / "out.json").read_text()


@pytest.mark.parametrize("arguments", ["reproduce letters", "probe out data.jsonl", "reproduce --help", "demo letters"])
def test_without_the_lab_its_commands_say_how_to_install_it(
    cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: str
) -> None:
    install(monkeypatch)
    monkeypatch.chdir(tmp_path)
    ran = cli(*arguments.split())
    assert ran.code == 2
    command = "demo letters" if arguments.startswith("demo") else arguments.split()[0]
    assert ran.err == (
        f"error: `tessellm {command}` belongs to the lab, which is not installed. In a clone: pip install ./lab\n"
    )
    assert not list(tmp_path.iterdir())


def test_another_word_is_no_command(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    assert "No such command 'conpose'" in cli("conpose").err
