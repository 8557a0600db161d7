"""Recipes: a composition as a YAML or JSON file, checked before anything is loaded.

    base: google/gemma-2-2b
    experts:
      math: MergeBench/gemma-2-2b_math
      coding: {source: MergeBench/gemma-2-2b_coding, weight: 0.8}
    rule: evidence                  # or product, or {name: evidence, …parameters}
    termination: owner              # who may stop; by default what suits the rule
    dtype: bfloat16
    device_map: {base: "cuda:0", math: "cuda:1", coding: "cuda:1"}

Paths that begin with a dot are relative to the recipe, other paths to the folder one is in. Unknown keys are
errors that name the nearest known key.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from .compose import compose
from .errors import RecipeError, nearest
from .model import ComposedForCausalLM
from .rules import DEFAULT


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)


class MemberEntry(_Strict):
    """One member of a recipe."""

    source: str
    weight: float = 1.0
    revision: str | None = None
    dtype: str | None = None
    device: str | int | None = None
    quantization: str | None = None
    any_base: bool = False

    def arguments(self, folder: Path) -> dict[str, Any]:
        source = os.path.abspath(folder / self.source) if self.source.startswith(".") else self.source
        return {**self.model_dump(), "source": source}


class Recipe(_Strict):
    """A composition, as a user writes it down."""

    base: MemberEntry
    experts: dict[str, MemberEntry] = Field(min_length=1)
    rule: str | dict[str, Any] = DEFAULT
    termination: str | None = None
    dtype: str | None = None
    device_map: str | int | dict[str, str | int] | None = None
    attn_implementation: str | None = None
    trust_remote_code: bool = False

    @field_validator("base", mode="before")
    @classmethod
    def _short_base(cls, base: Any) -> Any:
        return {"source": base} if isinstance(base, str) else base

    @field_validator("experts", mode="before")
    @classmethod
    def _short_experts(cls, experts: Any) -> Any:
        if not isinstance(experts, dict):
            return experts
        return {name: {"source": entry} if isinstance(entry, str) else entry for name, entry in experts.items()}

    def compose(self, folder: Path = Path()) -> ComposedForCausalLM:
        """Load the members and compose them; paths are relative to `folder`."""
        loading: dict[str, Any] = {"dtype": self.dtype} if self.dtype else {}
        return compose(
            self.base.arguments(folder),
            {name: entry.arguments(folder) for name, entry in self.experts.items()},
            rule=self.rule,
            termination=self.termination,
            device_map=self.device_map,
            attn_implementation=self.attn_implementation,
            trust_remote_code=self.trust_remote_code,
            **loading,
        )


def read_recipe(path: Path) -> Recipe:
    """Read and check a recipe."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(
            f"{path} cannot be read: {getattr(error, 'strerror', None) or 'it is not UTF-8 text'}"
        ) from error
    kind = "JSON" if path.suffix == ".json" else "YAML"
    try:
        content = _parse(text, kind)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise RecipeError(f"{path} is no valid {kind}: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise RecipeError(f"{path}: expected a mapping with the keys base and experts; got {_kind(content)}")
    try:
        return Recipe.model_validate(content)
    except ValidationError as error:
        found = sorted(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")  # misspelt keys first
        problems = dict.fromkeys(_explain(problem) for problem in found)
        raise RecipeError(f"{path}: " + "; ".join(problems)) from error


def _parse(text: str, kind: str) -> Any:
    if kind == "YAML":
        return yaml.load(text, Loader=_UniqueKeys)
    return json.loads(text, object_pairs_hook=_unique_pairs)


EXPECTED = {  # by the last known key of where a problem is
    "base": "a hub id, a folder, or a mapping with the key source",
    "experts": "a mapping from names to hub ids, folders or mappings with the key source, at least one",
    "source": "a hub id or a folder",
    "weight": "a finite number",
    "rule": "a rule's name, or a mapping with the key name and its parameters",
    "device_map": "a device, or a mapping from members to devices",
    "device": "a device, such as cpu or cuda:1",
    "any_base": "true or false",
    "trust_remote_code": "true or false",
}


def _explain(problem: Any) -> str:
    place = [str(part) for part in problem["loc"]]
    if problem["type"] == "extra_forbidden":
        owner = MemberEntry if len(place) > 1 else Recipe
        return f"unknown key {'.'.join(place)!r}; {nearest(place[-1], owner.model_fields)}"
    if problem["type"] == "missing":
        return f"the key {'.'.join(place)!r} is missing"
    if place[-1] == "[key]":
        return f"{place[0]}: expected names of letters; got {_shown(problem['input'])}"
    deepest = max((number for number, part in enumerate(place) if part in EXPECTED), default=len(place) - 1)
    in_expert = place[0] == "experts" and deepest == 0 and len(place) > 1
    where = place[:2] if in_expert else place[: deepest + 1]
    expected = EXPECTED["base"] if in_expert else EXPECTED.get(place[deepest], "text")
    return f"{'.'.join(where)}: expected {expected}; got {_shown(problem['input'])}"


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, str | int | float | bool) else _kind(value)


def _kind(value: Any) -> str:
    kinds = {type(None): "nothing", dict: "a mapping" if value else "an empty mapping", list: "a list", str: "text"}
    return kinds.get(type(value), type(value).__name__)


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise ValueError(f"the key {key!r} is there twice")
    return dict(pairs)


class _UniqueKeys(yaml.SafeLoader):
    """YAML whose mappings may not say a key twice, and in which 1e-3 is a number: YAML 1.1 wants 1.0e-3."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        merge = "tag:yaml.org,2002:merge"
        keys = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag != merge]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.YAMLError(f"the key {key!r} is there twice, near line {node.start_mark.line + 1}")
        return super().construct_mapping(node, deep)


_UniqueKeys.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d+[eE][-+]?\d+"), list("-+0123456789"))
