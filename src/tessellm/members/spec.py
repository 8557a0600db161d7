"""What a member is: as a user names it, how it is to be loaded, and loaded."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BeforeValidator, ConfigDict, Strict, TypeAdapter, ValidationError, with_config
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..errors import MemberError, nearest, quoted
from ..rules import LARGEST_WEIGHT
from ..validation import explain
from .examples import checked_description, read_examples
from .packed import PACKED
from .quantized import QUANTIZATIONS
from .sources import Source

LONGEST_NAME = 100  # characters: a name is a folder's, too
MEMBER_NAME = re.compile(rf"[A-Za-z_][A-Za-z0-9_-]{{0,{LONGEST_NAME - 1}}}")
TAKEN = ("base", "composed")  # the base, and what traces call the composition itself
DTYPES = ("float32", "bfloat16", "float16", "float64", *PACKED)


def dtype_of(dtype: str | torch.dtype) -> torch.dtype:
    """Return a dtype by its name; that of activations, where weights are packed."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype in PACKED:
        return torch.bfloat16
    if dtype not in DTYPES:
        raise MemberError(f"unknown dtype {dtype!r}; {nearest(dtype, DTYPES)}")
    return getattr(torch, dtype)


def _plain_number(number: Any) -> Any:
    """Turn numbers of numpy and others into Python's; leave anything else as it is, to be refused."""
    return float(number) if isinstance(number, Real) and not isinstance(number, bool) else number


Text = Annotated[str, Strict()]
Number = Annotated[float, Strict(), BeforeValidator(_plain_number)]

EXPECTED = {  # by key, for messages
    "source": "a hub id, a folder or a GGUF file",
    "weight": "a finite number",
    "device": "a device, such as cpu or cuda:1",
    "any_base": "true or false",
    "style": "true or false",
    "description": "one line that says what the expert is for",
    "examples": "a list of prompts, or a file that holds them",
}


@with_config(ConfigDict(extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False))
@dataclass(frozen=True)
class MemberSpec:
    """What a user says of one member, in a recipe or to `compose`."""

    source: Text | Path | nn.Module
    weight: Number = 1.0
    revision: Text | None = None
    dtype: Text | torch.dtype | None = None
    device: Text | Annotated[int, Strict()] | dict | None = None
    quantization: Text | None = None
    any_base: Annotated[bool, Strict()] = False  # take an adapter although its config names another base
    style: Annotated[bool, Strict()] = False  # an expert that is heard in every answer
    description: Text | None = None  # what the expert is for; the router compares prompts with it
    examples: tuple[Text, ...] | Text | Path | None = None  # prompts that it should answer; the base: keep

    def __post_init__(self) -> None:
        if isinstance(self.weight, bool) or not isinstance(self.weight, Real) or not abs(self.weight) <= LARGEST_WEIGHT:
            raise MemberError(f"a weight must be a number within ±{LARGEST_WEIGHT:,.0f}; got {self.weight!r}")
        if isinstance(self.dtype, str) and self.dtype != "auto":
            dtype_of(self.dtype)
        if self.quantization is not None and self.quantization not in QUANTIZATIONS:
            raise MemberError(
                f"unknown quantization {self.quantization!r}; {nearest(self.quantization, QUANTIZATIONS)}"
            )
        if self.description is not None:
            object.__setattr__(self, "description", checked_description(self.description))

    @property
    def prompts(self) -> tuple[str, ...]:
        """Return the examples; reads their file."""
        return () if self.examples is None else read_examples(self.examples)

    @classmethod
    def of(cls, member: Any) -> MemberSpec:
        """Make one of what `compose` takes: a path or hub id, a loaded model, a mapping, or a MemberSpec."""
        if isinstance(member, MemberSpec):
            return member
        if isinstance(member, Mapping):
            try:
                return TypeAdapter(cls).validate_python(dict(member))
            except ValidationError as error:
                raise MemberError(explain(error, EXPECTED, lambda place: cls.__dataclass_fields__)) from error
        if isinstance(member, str | Path | nn.Module):
            return cls(member)
        raise MemberError(
            "a member is a hub id, a folder, an adapter's folder, a GGUF file or a loaded model; got "
            f"{type(member).__name__}"
        )

    def seen_from(self, folder: Path) -> MemberSpec:
        """Return the same specification; a path that begins with a dot is relative to `folder`."""
        source, examples = (_from(folder, place) for place in (self.source, self.examples))
        return replace(self, source=source, examples=examples)


def _from(folder: Path, place: Any) -> Any:
    is_relative = isinstance(place, str) and place.startswith(".")
    return os.path.abspath(folder / place) if is_relative else place


@dataclass(frozen=True)
class Loading:
    """How members are loaded, where a member does not say otherwise."""

    dtype: str | torch.dtype | None = "auto"
    attn_implementation: str | None = None
    trust_remote_code: bool = False
    token: str | None = None
    cache_dir: str | None = None
    local_files_only: bool = False
    quantization_config: Any = None

    def __post_init__(self) -> None:
        if self.dtype not in (None, "auto"):
            dtype_of(self.dtype)

    def download_options(self) -> dict[str, Any]:
        return {
            "token": self.token,
            "cache_dir": self.cache_dir,
            "local_files_only": self.local_files_only,
            "trust_remote_code": self.trust_remote_code,
        }


@dataclass(frozen=True)
class Member:
    """A loaded member."""

    name: str
    model: PreTrainedModel
    spec: MemberSpec
    source: Source | None  # None: given as a loaded model
    is_adapter: bool = False
    tokenizer: PreTrainedTokenizerBase | None = None
    notes: tuple[str, ...] = field(default=())
    default_dtype: bool = False  # nobody said in which precision it runs

    @property
    def end_ids(self) -> tuple[int, ...]:
        """List every end token that the member declares, in its config or its generation config."""
        found: set[int] = set()
        for config in (self.model.config, getattr(self.model, "generation_config", None)):
            ids = getattr(config, "eos_token_id", None)
            found.update([ids] if isinstance(ids, int) else ids or [])
        return tuple(sorted(found))


def check_name(name: str) -> None:
    """Refuse a member name that cannot be a module's and a folder's."""
    taken = name in TAKEN or (isinstance(name, str) and hasattr(nn.ModuleDict, name))
    if not isinstance(name, str) or not MEMBER_NAME.fullmatch(name) or taken:
        raise MemberError(
            f"{quoted(str(name))} cannot be an expert's name: expected up to {LONGEST_NAME} letters, digits, _ and -, "
            "first a letter, and none of 'base', 'composed', 'keys', 'values', 'items' and the like"
        )
