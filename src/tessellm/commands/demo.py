"""`tessellm demo`: the main job on small experts that it makes itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .shared import JsonPath, Seed, out, write_json


def demo(
    directory: Annotated[Path, typer.Option("--out", "-o", help="Where to put what it makes.")] = Path("demo"),
    seed: Seed = 0,
    json_path: JsonPath = None,
) -> None:
    """Make small experts, compose them, show and diagnose the result.

    Example: tessellm demo -o demo
    """
    from ..experiments.demo.experiment import run_demo

    write_json(json_path, run_demo(directory, seed, out))
