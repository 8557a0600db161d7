"""What a member is: as a user names it, how it is to be loaded, and loaded."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..errors import MemberError, nearest
from ..rules import LARGEST_WEIGHT
from .quantized import QUANTIZATIONS
from .sources import Source

MEMBER_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_-]*$")
DTYPES = ("float32", "bfloat16", "float16", "float64")


def dtype_of(dtype: str | torch.dtype) -> torch.dtype:
    """A dtype by its name."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise MemberError(f"unknown dtype {dtype!r}; {nearest(dtype, DTYPES)}")
    return getattr(torch, dtype)


@dataclass(frozen=True)
class MemberSpec:
    """What a user says of one member."""

    source: str | Path | PreTrainedModel
    weight: float = 1.0
    revision: str | None = None
    dtype: str | torch.dtype | None = None
    device: str | int | dict | None = None
    quantization: str | None = None
    any_base: bool = False  # take an adapter although its config names another base

    def __post_init__(self) -> None:
        if isinstance(self.weight, bool) or not isinstance(self.weight, Real) or not abs(self.weight) <= LARGEST_WEIGHT:
            raise MemberError(f"a weight must be a number within ±{LARGEST_WEIGHT:,.0f}; got {self.weight!r}")
        if isinstance(self.dtype, str) and self.dtype != "auto":
            dtype_of(self.dtype)
        if self.quantization is not None and self.quantization not in QUANTIZATIONS:
            raise MemberError(
                f"unknown quantization {self.quantization!r}; {nearest(self.quantization, QUANTIZATIONS)}"
            )

    @classmethod
    def of(cls, member: Any) -> MemberSpec:
        """From what `compose` takes: a path or hub id, a loaded model, a mapping, or a MemberSpec."""
        if isinstance(member, MemberSpec):
            return member
        if isinstance(member, Mapping):
            known = cls.__dataclass_fields__
            for key in member:
                if key not in known:
                    raise MemberError(f"unknown key {key!r} of a member; {nearest(str(key), known)}")
            if "source" not in member:
                raise MemberError("a member given as a mapping needs the key 'source'")
            return cls(**member)
        if isinstance(member, str | Path | nn.Module):
            return cls(member)  # type: ignore[arg-type]
        raise MemberError(
            f"a member is a hub id, a folder, an adapter's folder or a loaded model; got {type(member).__name__}"
        )


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

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Every end token that the member declares, in its config or its generation config."""
        found: set[int] = set()
        for config in (self.model.config, getattr(self.model, "generation_config", None)):
            ids = getattr(config, "eos_token_id", None)
            found.update([ids] if isinstance(ids, int) else ids or [])
        return tuple(sorted(found))


def check_name(name: str) -> None:
    """Member names become module and folder names."""
    if not isinstance(name, str) or not MEMBER_NAME.match(name) or name == "base" or hasattr(nn.ModuleDict, name):
        raise MemberError(
            f"{name!r} cannot be an expert's name: expected letters, digits, _ and -, first a letter, and none of "
            "'base', 'keys', 'values', 'items' and the like"
        )
