"""Merging baselines, by mergekit: the same checkpoints made one model by averaging their weights.

Every method but the plain average has one strength λ, to be chosen on a development split. Full checkpoints only;
`merged.py` makes adapters into such.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tessellm.errors import MemberError, RecipeError, nearest, require
from tessellm.files import new_directory


@dataclass(frozen=True)
class Method:
    """A method of mergekit: its name there, what each model gets, what λ is called, and its paper. `strengths` are
    the values of λ among which one is chosen."""

    name: str
    reference: str
    model: Mapping[str, float]
    strength: str | None = "lambda"
    default: float = 1.0
    two_only: bool = False
    strengths: tuple[float, ...] = (0.2, 0.4, 0.6, 0.8, 1.0)


METHODS = {
    "linear": Method("linear", "arXiv 2203.05482", {"weight": 1.0}, strength=None, strengths=()),
    "task-arithmetic": Method("task_arithmetic", "arXiv 2212.04089", {"weight": 1.0}),
    "ties": Method("ties", "arXiv 2306.01708", {"weight": 1.0, "density": 0.2}, strengths=(0.4, 0.7, 1.0, 1.3, 1.6)),
    "dare": Method("dare_linear", "arXiv 2311.03099", {"weight": 1.0, "density": 0.5}),
    "slerp": Method("slerp", "Shoemake 1985", {}, "t", 0.5, two_only=True, strengths=(0.1, 0.3, 0.5, 0.7, 0.9)),
}


def methods_for(experts: int) -> list[str]:
    """Those that can merge so many."""
    return [name for name, method in METHODS.items() if experts == 2 or not method.two_only]


def check_method(method: str, experts: int, strength: float | None = None) -> Method:
    """The method, if it is one, can merge so many and can be so strong."""
    if method not in METHODS:
        raise RecipeError(f"unknown merging method {method!r}; {nearest(method, METHODS)}")
    if METHODS[method].two_only and experts != 2:
        raise RecipeError(f"{method} merges two experts; got {experts}")
    if METHODS[method].strength == "t" and strength is not None and not 0 <= strength <= 1:
        raise RecipeError(f"{method}'s t is between 0 and 1; got {strength:g}")
    return METHODS[method]


def recipe(
    method: str, base: str, experts: Mapping[str, str], strength: float | None = None, dtype: str = "float32"
) -> dict[str, Any]:
    """What mergekit is told. It computes in float32; `dtype` is what is stored."""
    how = check_method(method, len(experts), strength)
    content: dict[str, Any] = {"merge_method": how.name, "dtype": "float32", "out_dtype": dtype, "parameters": {}}
    content["models"] = [{"model": path, "parameters": dict(how.model)} for path in experts.values()]
    if how.two_only:
        content["base_model"] = next(iter(experts.values()))
    elif how.strength is not None:
        content["base_model"] = base
    if how.strength is not None:
        content["parameters"] = {how.strength: how.default if strength is None else strength}
    return content


def merge(
    method: str,
    base: str,
    experts: Mapping[str, str],
    target: Path,
    strength: float | None = None,
    seed: int = 0,
    dtype: str = "float32",
) -> Path:
    """Merge folders or hub ids into a checkpoint at `target`, by mergekit. `seed` is for dare, which draws."""
    require("mergekit", "merge")
    content = recipe(method, base, experts, strength, dtype)
    with new_directory(target, _is_merge) as folder:
        try:
            _run(content, folder, seed)
        except Exception as error:  # of many kinds, of several libraries
            reason = " ".join(str(error).split())[:300]
            raise MemberError(f"mergekit could not merge {', '.join(experts)} by {method}: {reason}") from error
    return target


def _run(content: dict[str, Any], folder: Path, seed: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from mergekit.config import MergeConfiguration
        from mergekit.merge import run_merge
        from mergekit.options import MergeOptions

        logging.getLogger("mergekit.merge").setLevel(logging.CRITICAL)  # a base without a tokenizer is no error here
        options = MergeOptions(random_seed=seed, quiet=True, copy_tokenizer=True)
        run_merge(MergeConfiguration.model_validate(content), str(folder), options)


def _is_merge(folder: Path) -> bool:
    return (folder / "mergekit_config.yml").is_file()
