"""`tessellm compose`: from a recipe to a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from ..errors import RecipeError
from .shared import JsonPath, calibration_progress, err, out, write_json


def compose(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A YAML or JSON recipe, or a folder of adapters.")],
    directory: Annotated[Path, typer.Option("--out", "-o", help="The composition's folder.")],
    self_contained: Annotated[bool, typer.Option(help="Store the members' weights inside.")] = False,
    base: Annotated[
        str | None,
        typer.Option(
            help="Of a folder of adapters: their base, in place of the one that they name.", show_default=False
        ),
    ] = None,
    json_path: JsonPath = None,
) -> None:
    """Make a checkpoint from a recipe or a folder of adapters.

    Example: tessellm compose recipe.yaml -o out
    """
    from ..checkpoint import check_target
    from ..recipe import FoundRecipe, find_recipe, read_recipe

    found = find_recipe(recipe, base)
    if found is None and recipe.is_dir():
        raise RecipeError(_folder_instead(recipe))
    check_target(directory)
    model = (found or FoundRecipe(read_recipe(recipe), recipe.parent)).compose(calibration_progress())
    model.save_pretrained(directory, self_contained=self_contained)
    for note in model.notes:
        err.print(f"note: {escape(note)}", soft_wrap=True)
    experts = ", ".join(model.config.member_names[1:])
    out.print(f"composed {escape(experts)} on their base → {escape(str(directory))}", soft_wrap=True)
    write_json(json_path, {"directory": str(directory), "members": model.config.members, "notes": model.notes})


def _folder_instead(folder: Path) -> str:
    expected = (
        "Expected a recipe (a YAML or JSON file that names a base and experts) or a folder whose subfolders are "
        "adapters, see docs/compose.md"
    )
    if (folder / "config.json").is_file():
        expected += f". To see what a composition is made of: tessellm inspect {folder}"
    return f"{folder} is a folder. {expected}"
