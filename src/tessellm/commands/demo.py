"""`tessellm demo`: the main job, on a real chat model with experts of this repository or on letters."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from .plugins import DEMOS, load_plugin
from .shared import JsonPath, out, write_json


def demo(
    which: Annotated[
        Literal["skills", "letters"],
        typer.Argument(help="skills: five LoRA experts of SmolLM2; letters: small experts that it trains (the lab's)."),
    ] = "skills",
    directory: Annotated[Path, typer.Option("--out", "-o", help="Where to put what it makes.")] = Path("demo"),
    adapters: Annotated[
        Path | None, typer.Option(help="Folder with the experts of skills; the repository's adapters/smollm2.")
    ] = None,
    json_path: JsonPath = None,
) -> None:
    """Compose experts, show what they say together and who spoke.

    Example: tessellm demo -o demo
    """
    if which == "letters":
        write_json(json_path, load_plugin(which, DEMOS)(directory, console=out))
        return
    from ..demo.skills import run_skills_demo

    write_json(json_path, run_skills_demo(directory, adapters, out))
