"""Recipes: a composition as a YAML or JSON file, checked before anything is loaded.

    base: google/gemma-2-2b
    experts:
      math: MergeBench/gemma-2-2b_math
      coding: {source: MergeBench/gemma-2-2b_coding, weight: 0.8}
    rule: product                   # or {name: product, …parameters}
    termination: rule
    dtype: bfloat16
    device_map: {base: "cuda:0", math: "cuda:1", coding: "cuda:1"}

Paths that begin with a dot are relative to the recipe. Unknown keys are errors that name the nearest known key.
"""

from __future__ import annotations

import json
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from .compose import compose
from .errors import RecipeError, nearest
from .model import ComposedForCausalLM


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


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
        source = str(folder / self.source) if self.source.startswith(".") else self.source
        return {**self.model_dump(), "source": source}


class Recipe(_Strict):
    """A composition, as a user writes it down."""

    base: MemberEntry
    experts: dict[str, MemberEntry] = Field(min_length=1)
    rule: str | dict[str, Any] = "product"
    termination: str = "rule"
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
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(
            f"{path} cannot be read: {getattr(error, 'strerror', None) or 'it is not UTF-8 text'}"
        ) from error
    try:
        content = json.loads(text) if path.suffix == ".json" else yaml.load(text, Loader=_UniqueKeys)
    except (yaml.YAMLError, ValueError) as error:
        raise RecipeError(f"{path} is no valid {'JSON' if path.suffix == '.json' else 'YAML'}: {error}") from error
    if not isinstance(content, dict):
        raise RecipeError(f"{path}: expected a mapping with the keys base and experts; got {_kind(content)}")
    try:
        return Recipe.model_validate(content)
    except ValidationError as error:
        raise RecipeError(f"{path}: " + "; ".join(_explain(problem) for problem in error.errors())) from error


def _explain(problem: Any) -> str:
    where = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        owner = MemberEntry if len(problem["loc"]) > 1 else Recipe
        return f"unknown key {where!r}; {nearest(str(problem['loc'][-1]), owner.model_fields)}"
    if problem["type"] == "missing":
        return f"the key {where!r} is missing"
    got = problem["input"]
    shown = repr(got) if isinstance(got, str | int | float | bool | None) else _kind(got)
    return f"{where}: {problem['msg'][0].lower()}{problem['msg'][1:]}; got {shown}"


def _kind(value: Any) -> str:
    kinds = {type(None): "nothing", dict: "a mapping", list: "a list", str: "text"}
    return kinds.get(type(value), type(value).__name__)


class _UniqueKeys(yaml.SafeLoader):
    """YAML whose mappings may not say a key twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.YAMLError(f"the key {key!r} is there twice, near line {node.start_mark.line + 1}")
        return super().construct_mapping(node, deep)
