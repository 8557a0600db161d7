"""Outputs never overwrite what a command reads, nor a model's files; bounds that options share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tessellm

Cli = Callable[..., Any]


@pytest.fixture
def place(own_members: Path) -> Path:
    """A linked composition, its recipe, prompts."""
    (own_members / "recipe.yaml").write_text("base: ./base\nexperts: {math: ./math}\n")
    (own_members / "prompts.txt").write_text("abc\n")
    composed = tessellm.compose(own_members / "base", {"math": own_members / "math"}, rule="product")
    composed.save_pretrained(own_members / "out")
    return own_members


REFUSED = {
    "diagnose out prompts.txt -o prompts.txt": "--out would overwrite",
    "diagnose out prompts.txt --json prompts.txt": "--json would overwrite",
    "diagnose out prompts.txt --json link.txt": "--json would overwrite",
    "diagnose out prompts.txt -o out/config.json": "a file of a model",
    "generate out --file prompts.txt --json prompts.txt": "which this command reads",
    "generate recipe.yaml abc --json math/model.safetensors": "a file of a model",
    "compose recipe.yaml -o new --json recipe.yaml": "which this command reads",
    "inspect out --json base/tokenizer.json": "a file of a model",
    "diagnose out prompts.txt -o report.html --json report.html": "name the same file",
}


@pytest.mark.parametrize("command", REFUSED)
def test_an_output_that_would_overwrite_an_input_is_refused(
    cli: Cli, place: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(place)
    (place / "link.txt").symlink_to(place / "prompts.txt")
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    ran = cli(*command.split())
    assert ran.code == 2
    assert REFUSED[command] in ran.err
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == before


def test_other_files_are_written_again(cli: Cli, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    for name in ("report.json", "config.json"):  # which is no model's here
        for _ in range(2):
            assert cli("inspect", "out", "--json", name).code == 0


@pytest.mark.parametrize("temperature", ["1e308", "10001", "inf", "1e-9"])
def test_a_temperature_out_of_bounds_gets_a_message(cli: Cli, place: Path, temperature: str) -> None:
    ran = cli("generate", place / "out", "abc", "--temperature", temperature)
    assert ran.code == 2
    assert "expected a temperature of 0, which decodes greedily, or from 0.0001 to 10,000" in ran.err


def test_the_hottest_temperature_writes(cli: Cli, place: Path) -> None:
    for engine in ("auto", "reference"):
        options = ("--temperature", "10000", "--max-new-tokens", "3", "--engine", engine)
        assert cli("generate", place / "out", "abc", *options).code == 0
