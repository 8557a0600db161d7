"""`tessellm demo`: the main job, on a real chat model with experts of this repository or on letters."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from .shared import JsonPath, Seed, out, write_json


def demo(
    which: Annotated[
        Literal["skills", "letters"],
        typer.Argument(help="skills: five LoRA experts of SmolLM2; letters: small experts that it trains."),
    ] = "skills",
    directory: Annotated[Path, typer.Option("--out", "-o", help="Where to put what it makes.")] = Path("demo"),
    adapters: Annotated[
        Path | None, typer.Option(help="Folder with the experts of skills; the repository's adapters/smollm2.")
    ] = None,
    seed: Seed = 0,
    json_path: JsonPath = None,
) -> None:
    """Compose experts, show what they say together and who spoke.

    Example: tessellm demo -o demo
    """
    if which == "letters":
        from ..experiments.demo.experiment import run_letters_demo

        write_json(json_path, run_letters_demo(directory, seed, out))
        return
    from ..experiments.demo.skills import run_skills_demo

    write_json(json_path, run_skills_demo(directory, adapters, out))
