"""Links of a composition to its members: where each is, seen from the composition's folder, and what it was."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..members import Loading, Member, MemberSpec, sources
from .stamps import Stamp, telling_files


def link(member: Member, target: Path) -> dict[str, Any]:
    """Where a member is, seen from the composition's folder, and how it was loaded."""
    if member.source is None:
        raise CheckpointError(
            f"member {member.name!r} was given as a loaded model, so there is nothing to link to. Save with "
            "self_contained=True, or compose from folders"
        )
    if target.resolve() in member.source.path.parents:
        raise CheckpointError(
            f"member {member.name!r} is inside {target}, which would be replaced by a link to it. Save self-contained, "
            "or to another folder"
        )
    entry: dict[str, Any] = {}
    if not member.is_adapter:
        entry["dtype"] = str(member.model.dtype).removeprefix("torch.")
    if member.spec.quantization is not None:
        entry["quantization"] = member.spec.quantization
    if member.source.hub_id is not None:
        return {"source": member.source.name, "revision": member.source.revision, **entry}
    entry["stamp"] = vars(Stamp.of(telling_files(member.source)))
    if member.source.package is not None:
        return {"source": member.source.name, **entry}
    path = Path(os.path.relpath(member.source.path, target.resolve())).as_posix()
    return {"source": path if path.startswith(".") else f"./{path}", **entry}


def saved_member(entry: Mapping[str, Any], folder: Path, loading: Loading) -> MemberSpec:
    """Where a member of a saved composition is; refused if it is gone or no longer what it was."""
    name, source = entry["name"], entry.get("source")
    if not source:
        raise CheckpointError(f"{folder / 'config.json'} does not say where member {name!r} is")
    as_saved = loading.dtype in (None, "auto")
    is_here = source.startswith((".", sources.PACKAGE))
    return MemberSpec(
        _linked_source(entry, folder) if is_here else source,
        weight=entry["weight"],
        revision=entry.get("revision"),
        dtype=entry.get("dtype") if as_saved else None,
        quantization=entry.get("quantization"),
        any_base=True,  # checked when it was composed
    )


def _linked_source(entry: Mapping[str, Any], folder: Path) -> str:
    name, place = entry["name"], entry["source"]
    if place.startswith("."):
        place = os.path.normpath(folder / place)
        if not Path(place).exists():
            raise CheckpointError(
                f"member {name!r} is missing: {folder} links to {place}, which is not there. Move it back, or compose "
                "again"
            )
    source = sources.find(place, f"member {name!r}")
    sources.check(source, f"member {name!r}")
    if "stamp" in entry and not Stamp(**entry["stamp"]).matches(telling_files(source)):
        raise CheckpointError(
            f"member {name!r} has changed since it was composed: {source.path} holds other weights or another config. "
            "Compose again to take them"
        )
    return place
