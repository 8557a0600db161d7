"""Links of a composition to its members: where each is, seen from the composition's folder, and what it was."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..members import Loading, Member, MemberSpec, SavedMember, sources
from ..members.packed import is_packed
from ..members.saved import Stamp


def link(saved: SavedMember, member: Member, target: Path) -> SavedMember:
    """Add to a saved member where it is, relative to the composition's folder, and how it was loaded."""
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
    by_default = member.is_adapter or member.default_dtype  # as it is stored, or as suits the device
    dtype = None if by_default else is_packed(member.model) or str(member.model.dtype).removeprefix("torch.")
    return saved.placed(dtype=dtype, quantization=member.spec.quantization, **_place(member.source, target))


def _place(source: sources.Source, target: Path) -> dict[str, Any]:
    if source.hub_id is not None:
        return {"source": source.name, "revision": source.revision}
    if source.package is not None:
        return {"source": source.name, "stamp": Stamp.of(source)}
    path = Path(os.path.relpath(source.path, target.resolve())).as_posix()
    return {"source": path if path.startswith(".") else f"./{path}", "stamp": Stamp.of(source)}


def saved_spec(saved: SavedMember, folder: Path, loading: Loading) -> MemberSpec:
    """Say how to load a member of a saved composition; refuse one that is gone or has changed."""
    if saved.source is None:
        raise CheckpointError(f"{folder / 'config.json'} does not say where member {saved.name!r} is")
    as_saved = loading.dtype in (None, "auto")
    return MemberSpec(
        _linked_source(saved, saved.source, folder),
        weight=saved.weight,
        style=bool(saved.style),
        description=saved.description,
        examples=None if saved.examples is None else tuple(saved.examples),
        revision=saved.revision,
        dtype=saved.dtype if as_saved else None,
        quantization=saved.quantization,
        any_base=True,  # checked when it was composed
    )


def _linked_source(saved: SavedMember, place: str, folder: Path) -> str:
    """Return where the member is; a local one must be what it was when saved."""
    if not place.startswith((".", sources.PACKAGE)):
        return place
    if place.startswith("."):
        place = os.path.normpath(folder / place)
        if saved.stamp is None and not Path(os.path.realpath(place)).is_relative_to(os.path.realpath(folder)):
            raise CheckpointError(
                f"member {saved.name!r} lies outside its composition: {folder} is self-contained, but its config.json "
                f"or a link in it leads to {os.path.realpath(place)}. Copy the member into the folder, or compose again"
            )
        if not sources.exists(Path(place)):
            raise CheckpointError(
                f"member {saved.name!r} is missing: {folder} links to {place}, which is not there. Move it back, or "
                "compose again"
            )
    source = sources.find(place, f"member {saved.name!r}")
    sources.check(source, f"member {saved.name!r}")
    if saved.stamp is not None and not saved.stamp.matches(source):
        raise CheckpointError(
            f"member {saved.name!r} has changed since it was composed: {source.path} holds other weights or another "
            "config. Compose again to take them"
        )
    return place
