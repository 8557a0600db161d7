"""A composition from its folder, hub id or recipe, as it was made or as asked for: what every command begins with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .checkpoint import load
from .errors import MemberError
from .model import ComposedForCausalLM
from .model.variants import alone, changed_weights, check_alone, check_rule_name, meant_rule, no_such_speaker
from .recipe import find_recipe
from .routing.calibration import Progress
from .rules import Product


def load_model(
    path: str,
    device: str | None = None,
    dtype: str | None = None,
    rule: str | None = None,
    only: str | None = None,
    progress: Progress | None = None,
) -> ComposedForCausalLM:
    """Load a composition from its folder or hub id, from a recipe, or from a folder of adapters. `rule`: what a
    recipe's members are composed by, if it is another than its own, which might take long to make for nothing; `only`:
    the one member that is wanted, if it can be had without the others; `progress`: called with how many calibration
    prompts were read, of how many."""
    found = find_recipe(path)
    if found is None:
        return load(path, only=only, progress=progress, device_map=device, dtype=dtype or "auto")
    recipe = found.recipe
    own = recipe.rule if isinstance(recipe.rule, str) else recipe.rule.get("name")
    changes: dict[str, Any] = {key: value for key, value in (("device_map", device), ("dtype", dtype)) if value}
    changes |= {"rule": rule} if rule not in (None, own) else {}
    wanted = next(iter(recipe.experts)) if only == "base" else only
    if wanted in recipe.experts:
        changes["experts"] = {wanted: recipe.experts[wanted]}
    return found.compose(progress, **changes)


def load_speaker(
    asked: str,
    device: str | None = None,
    dtype: str | None = None,
    rule: str | None = None,
    weights: Mapping[str, float] | None = None,
    progress: Progress | None = None,
) -> ComposedForCausalLM:
    """Load a composition, under another rule or with other weights if they are given, or one member (MODEL:MEMBER)."""
    path, member = split_speaker(asked)
    if member is not None:
        check_alone(asked, rule, weights)
    if rule is not None:
        check_rule_name(rule)
    model = load_model(path, device, dtype, rule if member is None else Product.name, member, progress)
    if member is not None:
        if member not in model.members:
            raise MemberError(no_such_speaker(asked, path, model.config.member_names))
        return alone(model, member)
    if rule is not None or weights is not None:
        meant = None if rule is None else meant_rule(model, rule)
        model.set_rule(meant, changed_weights(model, weights or {}))
    return model


def split_speaker(asked: str) -> tuple[str, str | None]:
    """Split MODEL:MEMBER; a folder or file whose own name has a colon is a model."""
    path, colon, member = asked.rpartition(":")
    return (path, member) if colon and path and not Path(asked).exists() else (asked, None)
