"""Write a composition's examples, and the router that knows them, in place of those in its folder. All else stays as it
is, and nothing is seen before all of it is written."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from .. import files
from ..errors import CheckpointError
from ..routing.router import DeltaRouter
from ..routing.stored import write_router
from .reader import ROUTER, is_composition, read_config
from .save import check_target, take_over

CONFIG = "config.json"


def save_examples(folder: Path, router: DeltaRouter, examples: Mapping[str, Sequence[str]]) -> None:
    """Write the examples of all members. Refuses a folder that holds other experts than the router."""
    names = read_config(folder).member_names
    if set(names) != set(examples):
        raise CheckpointError(
            f"{folder} holds {', '.join(names)}, and these examples are of {', '.join(examples)}: experts came or went "
            "since it was loaded. Nothing was written"
        )
    check_target(folder)
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    for entry in config["members"]:
        entry.pop("examples", None)
        if given := list(examples[entry["name"]]):
            entry["examples"] = given
    with files.new_directory(folder, is_composition) as new:
        take_over(folder, new, without=(CONFIG, ROUTER))
        (new / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        write_router(router, new / ROUTER)
