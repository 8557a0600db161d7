"""`tessellm add` and `tessellm remove`: one expert of a composition, without composing the others again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from .shared import JsonPath, err, out, write_json

Folder = Annotated[Path, typer.Argument(metavar="OUT", help="A composition's folder, which is changed.")]


def add(
    folder: Folder,
    source: Annotated[str, typer.Argument(metavar="ADAPTER", help="An adapter's or a model's folder, or a hub id.")],
    name: Annotated[str | None, typer.Option(help="The expert's name; its folder's if not given.")] = None,
    description: Annotated[
        str | None, typer.Option(help="One line on what it is for; its model card's if not given.")
    ] = None,
    json_path: JsonPath = None,
) -> None:
    """Add an expert to a composition. Only that one is calibrated.

    Example: tessellm add out ./lora_contracts --description "Answers questions about contracts."
    """
    from ..checkpoint.changes import add_expert
    from ..members import MemberSpec

    changed = add_expert(folder, MemberSpec(source, description=description), name)
    for note in changed.notes:
        err.print(f"note: {escape(note)}", soft_wrap=True)
    out.print(f"added {escape(changed.config.member_names[-1])} → {escape(str(folder))}", soft_wrap=True)
    write_json(json_path, {"directory": str(folder), "members": changed.config.members, "notes": changed.notes})


def remove(
    folder: Folder,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The expert's name.")],
    json_path: JsonPath = None,
) -> None:
    """Remove an expert from a composition.

    Example: tessellm remove out contracts
    """
    from ..checkpoint.changes import remove_expert

    changed = remove_expert(folder, name)
    out.print(f"removed {escape(name)} → {escape(str(folder))}", soft_wrap=True)
    write_json(json_path, {"directory": str(folder), "members": changed.config.members, "notes": changed.notes})
