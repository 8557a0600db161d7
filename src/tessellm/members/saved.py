"""A member as a composition's config.json holds it: the one place that says which keys there are, and checks them.

Knows no folders: `checkpoint.links` says where a member is, seen from the composition's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, with_config

from ..errors import nearest
from ..rules import LARGEST_WEIGHT
from ..validation import shown
from .cards import read_card
from .examples import LONGEST as DESCRIPTION
from .quantized import QUANTIZATIONS
from .sources import LONGEST, Source, digest, weight_files
from .spec import Member

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Text = Annotated[str, Field(min_length=1, max_length=LONGEST)]


def known_quantization(kind: str) -> str:
    """Return the name of a quantization; refuse any other."""
    if kind not in QUANTIZATIONS:
        raise ValueError(f"unknown quantization {shown(kind)}; {nearest(kind[:LONGEST], QUANTIZATIONS)}")
    return kind


EXPECTED = {  # by key, for messages
    "members": "a list of members, the base first and at least one expert",
    "name": "a member's name",
    "kind": "full or adapter",
    "weight": f"a number within ±{LARGEST_WEIGHT:,.0f}",
    "end_ids": "a list of token ids",
    "style": "true, or nothing",
    "description": "one line of text",
    "examples": "a list of texts",
    "source": "a path, a hub id or a package's file",
    "revision": "a commit",
    "dtype": "float32, bfloat16, float16, float64, int8 or int4",
    "quantization": "a quantization's name",
    "stamp": "the sha256 and the sizes of files",
}


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True)
class Stamp:
    """What a linked member's files were when it was composed: quick to compare if they are untouched, exact if not."""

    sha256: str
    files: list[list[int]]  # [bytes, changed_ns] of each, as JSON keeps it

    @classmethod
    def of(cls, source: Source) -> Stamp:
        files = telling_files(source)
        return cls(digest(files), quick(files))

    def matches(self, source: Source) -> bool:
        files = telling_files(source)
        return self.files == quick(files) or self.sha256 == digest(files)


def quick(files: Sequence[Path]) -> list[list[int]]:
    """List size and time of each file."""
    return [[file.stat().st_size, file.stat().st_mtime_ns] for file in files]


def telling_files(source: Source) -> list[Path]:
    """List the files that make a member what it is: weights and configs."""
    if source.file is not None:
        return [source.path]
    configs = (source.directory / name for name in ("config.json", "adapter_config.json"))
    return [*weight_files(source.directory), *(path for path in configs if path.is_file())]


KEPT = ("name", "kind", "weight", "end_ids", "style", "description", "examples")  # wherever a member is


class SavedMember(BaseModel):
    """One member of a composition: what is always known of it, and, once it is saved, where it is and what it was."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)

    name: Text
    kind: Literal["full", "adapter"]
    weight: Annotated[float, Field(ge=-LARGEST_WEIGHT, le=LARGEST_WEIGHT)]
    end_ids: list[TokenId]  # in the composition's ids
    style: Literal[True] | None = None  # declared to be heard in every answer
    description: Annotated[str, Field(min_length=1, max_length=DESCRIPTION)] | None = None  # what it is for
    examples: list[str] | None = None  # prompts that it should answer
    source: Text | None = None  # None: given as a loaded model
    revision: Text | None = None  # a hub member's commit
    dtype: Literal["float32", "bfloat16", "float16", "float64", "int8", "int4"] | None = (
        None  # what it was loaded in; an adapter has its base's
    )
    quantization: Annotated[str, AfterValidator(known_quantization)] | None = None
    stamp: Stamp | None = None  # a local member's files

    @classmethod
    def of(cls, member: Member, end_ids: Sequence[int]) -> SavedMember:
        """Describe a loaded member, with its end tokens in the composition's ids."""
        return cls(
            name=member.name,
            kind="adapter" if member.is_adapter else "full",
            weight=float(member.spec.weight),
            end_ids=list(end_ids),
            style=member.spec.style or None,
            description=member.spec.description or _card_description(member),
            examples=list(member.spec.prompts) or None,
            source=member.source.name if member.source else None,
            revision=member.source.revision if member.source else None,
        )

    def placed(self, **place: Any) -> SavedMember:
        """Return the same member, found and loaded as `place` says."""
        always = {key: getattr(self, key) for key in KEPT}
        return SavedMember(**always, **place)

    def entry(self) -> dict[str, Any]:
        """Return the entry that config.json holds."""
        return self.model_dump(exclude_none=True)


def _card_description(member: Member) -> str | None:
    """Return the description on the model card beside an expert."""
    if member.name == "base" or member.source is None or member.source.file is not None:
        return None
    return read_card(member.source.directory).description
