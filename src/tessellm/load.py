"""A composition from its folder or hub id, or from a recipe: what every command begins with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .checkpoint import load
from .model import ComposedForCausalLM


def load_model(path: str, device: str | None = None, dtype: str | None = None) -> ComposedForCausalLM:
    """A composition from its folder or hub id, or from a recipe."""
    if Path(path).suffix in (".yaml", ".yml", ".json"):
        from .recipe import read_recipe

        changes: dict[str, Any] = {key: value for key, value in (("device_map", device), ("dtype", dtype)) if value}
        return read_recipe(Path(path)).model_copy(update=changes).compose(Path(path).parent)
    return load(path, device_map=device, dtype=dtype or "auto")
