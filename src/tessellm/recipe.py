"""Recipes: a composition as a YAML or JSON file, checked before anything is loaded.

    base: google/gemma-2-2b
    experts:
      math: MergeBench/gemma-2-2b_math
      coding:
        source: MergeBench/gemma-2-2b_coding
        description: Writes Python functions.
        examples: [Write a function that sorts a list., "Fix this loop:"]  # or a file of prompts
        weight: 0.8
    rule: mixture                   # or product, or {name: mixture, …parameters}; the default is auto
    dtype: bfloat16
    base_retention: 0.95            # the share of ordinary prompts that the router leaves to the base
    device_map: {base: "cuda:0", math: "cuda:1", coding: "cuda:1"}

Paths that begin with a dot are relative to the recipe, other paths to the folder one is in. Unknown keys are
errors that name the nearest known key.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from .compose import compose
from .errors import MemberError, RecipeError
from .members import MemberSpec
from .members.folders import AdapterFolder, is_adapter_folder, read_adapter_folder
from .members.spec import EXPECTED as MEMBER_KEYS
from .model import ComposedForCausalLM
from .routing.calibration import Progress
from .routing.router import BASE_RETENTION
from .rules import DEFAULT
from .validation import explain, kind


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)


class Recipe(_Strict):
    """A composition, as a user writes it down."""

    base: MemberSpec
    experts: dict[str, MemberSpec] = Field(min_length=1)
    rule: str | dict[str, Any] = DEFAULT
    chat_template: str | None = None
    dtype: str | None = None
    device_map: str | int | dict[str, str | int] | None = None
    router: bool = True
    base_retention: float = BASE_RETENTION
    embedder: str | None = None
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

    def compose(self, folder: Path = Path(), progress: Progress | None = None) -> ComposedForCausalLM:
        """Load the members and compose them; paths are relative to `folder`."""
        loading: dict[str, Any] = {"dtype": self.dtype} if self.dtype else {}
        return compose(
            self.base.seen_from(folder),
            {name: member.seen_from(folder) for name, member in self.experts.items()},
            rule=self.rule,
            chat_template=self.chat_template,
            router=self.router,
            base_retention=self.base_retention,
            embedder=self._embedder(folder),
            progress=progress,
            device_map=self.device_map,
            attn_implementation=self.attn_implementation,
            trust_remote_code=self.trust_remote_code,
            **loading,
        )

    def _embedder(self, folder: Path) -> str | None:
        is_relative = self.embedder is not None and self.embedder.startswith(".")
        return str((folder / str(self.embedder)).resolve()) if is_relative else self.embedder


def read_recipe(path: Path) -> Recipe:
    """Read and check a recipe."""
    try:
        if path.stat().st_size > LARGEST:
            raise RecipeError(f"{path} has {path.stat().st_size:,} bytes; a recipe has at most {LARGEST:,}")
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(
            f"{path} cannot be read: {getattr(error, 'strerror', None) or 'it is not UTF-8 text'}"
        ) from error
    notation = "JSON" if path.suffix == ".json" else "YAML"
    try:
        content = _parse(text, notation)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise RecipeError(f"{path} is no valid {notation}: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise RecipeError(f"{path}: expected a mapping with the keys base and experts; got {kind(content)}")
    try:
        return Recipe.model_validate(content)
    except ValidationError as error:
        raise RecipeError(f"{path}: {explain(error, EXPECTED, _known_keys)}") from error
    except MemberError as error:
        raise RecipeError(f"{path}: {error}") from error


def find_recipe(model: str | Path, base: str | None = None) -> FoundRecipe | None:
    """Return what says how a model is composed: a recipe's file or a folder of adapters; None for a composition.
    `base` names the base of a folder's adapters in place of their configurations."""
    path = Path(model)
    if is_adapter_folder(path):
        here = None if base is None else os.path.abspath(base) if Path(base).expanduser().exists() else base
        found = read_adapter_folder(path, here)
        recipe = Recipe(base=MemberSpec(found.base), experts=found.members())
        return FoundRecipe(recipe, found.path, found.notes, found)
    if base is not None:
        raise RecipeError(f"--base goes with a folder of adapters; {path} has a base of its own")
    if path.suffix in SUFFIXES and not path.is_dir():
        return FoundRecipe(read_recipe(path), path.parent)
    return None


@dataclass(frozen=True)
class FoundRecipe:
    """A recipe, the folder that its paths are seen from, and what a user should know of how it was found."""

    recipe: Recipe
    folder: Path
    notes: tuple[str, ...] = ()
    adapters: AdapterFolder | None = None  # that it was made of

    def compose(self, progress: Progress | None = None, **changes: Any) -> ComposedForCausalLM:
        """Load the members and compose them, with some keys of the recipe changed."""
        model = self.recipe.model_copy(update=changes).compose(self.folder, progress)
        model.notes = tuple(dict.fromkeys((*self.notes, *model.notes)))
        return model


def _parse(text: str, notation: str) -> Any:
    if notation == "YAML":
        return yaml.load(text, Loader=_UniqueKeys)
    return json.loads(text, object_pairs_hook=_unique_pairs)


def _known_keys(place: tuple[str, ...]) -> Iterable[str]:
    return MemberSpec.__dataclass_fields__ if len(place) > 1 else Recipe.model_fields


SUFFIXES = (".yaml", ".yml", ".json")
LARGEST = 1 << 20  # bytes of a recipe
NODES = 10_000  # of a YAML recipe, with what its aliases stand for
MEMBER = "a hub id, a folder, or a mapping with the key source"
EXPECTED = {  # by the last known key of where a problem is; experts.* is what each of them should be
    "base": MEMBER,
    "experts": "a mapping from names to hub ids, folders or mappings with the key source, at least one",
    "experts.*": MEMBER,
    **MEMBER_KEYS,
    "rule": "a rule's name, or a mapping with the key name and its parameters",
    "device_map": "a device, or a mapping from members to devices",
    "router": "true or false",
    "base_retention": "a share between 0 and 1, such as 0.95",
    "embedder": "a sentence-transformers model's name or folder",
    "trust_remote_code": "true or false",
}


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise ValueError(f"the key {key!r} is there twice")
    return dict(pairs)


def _expanded_size(node: Any, sizes: dict[int, float]) -> float:
    """How many nodes there are with every alias written out; one that holds itself has no end."""
    if id(node) not in sizes:
        sizes[id(node)] = math.inf  # while it is being counted
        children = node.value if isinstance(node.value, list) else []
        parts = [part for child in children for part in (child if isinstance(child, tuple) else (child,))]
        sizes[id(node)] = 1 + sum(_expanded_size(part, sizes) for part in parts)
    return sizes[id(node)]


class _UniqueKeys(yaml.SafeLoader):
    """YAML whose mappings may not say a key twice, and in which 1e-3 is a number: YAML 1.1 wants 1.0e-3.

    What aliases stand for is counted before anything is made of it: a few of them can stand for billions.
    """

    def get_single_node(self) -> Any:
        node = super().get_single_node()
        if node is not None and _expanded_size(node, {}) > NODES:
            raise yaml.YAMLError(f"its aliases stand for more than {NODES:,} entries")
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        merge = "tag:yaml.org,2002:merge"
        keys = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag != merge]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.YAMLError(f"the key {key!r} is there twice, near line {node.start_mark.line + 1}")
        return super().construct_mapping(node, deep)


_UniqueKeys.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d+[eE][-+]?\d+"), list("-+0123456789"))
