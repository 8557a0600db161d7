"""An adapter's adapter_config.json: checked, then read by PEFT, which takes values of any type as they are."""

from __future__ import annotations

import json
import warnings
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import MemberError
from ..validation import explain
from .sources import Source

LARGEST = 1 << 20  # bytes of an adapter_config.json
UNREADABLE = (ValueError, KeyError, TypeError, OSError, AttributeError, RecursionError)  # what reading one raises

Names = list[str] | str | None
Count = Annotated[int, Field(ge=1)]
NAMES = "module names, a list of texts or one text"


class _AnyAdapter(BaseModel):
    """Keys that several methods have; other keys are left to PEFT."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)

    target_modules: Names = None
    exclude_modules: Names = None
    modules_to_save: list[str] | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: Names = None
    trainable_token_indices: list[int] | dict[str, list[int]] | None = None
    megatron_config: None = None  # PEFT would import the module that the file names


class _Lora(_AnyAdapter):
    r: Count = 8
    lora_alpha: float = 8
    lora_dropout: Annotated[float, Field(ge=0, le=1)] = 0.0
    rank_pattern: dict[str, Count] | None = None
    alpha_pattern: dict[str, float] | None = None
    bias: Literal["none", "all", "lora_only"] = "none"
    use_rslora: bool = False
    use_dora: bool = False
    fan_in_fan_out: bool = False
    lora_bias: bool = False
    init_lora_weights: bool | str | None = True
    target_parameters: list[str] | None = None


EXPECTED = {
    **dict.fromkeys(("target_modules", "exclude_modules", "layers_pattern"), NAMES),
    **dict.fromkeys(("modules_to_save", "target_parameters"), "a list of names"),
    **dict.fromkeys(("use_rslora", "use_dora", "fan_in_fan_out", "lora_bias"), "true or false"),
    "layers_to_transform": "layer numbers",
    "trainable_token_indices": "token ids",
    "megatron_config": "nothing",
    "r": "a whole number from 1",
    "lora_alpha": "a finite number",
    "lora_dropout": "a number from 0 to 1",
    "rank_pattern": "whole numbers from 1 by module",
    "alpha_pattern": "finite numbers by module",
    "bias": "none, all or lora_only",
    "init_lora_weights": "true, false or a method's name",
}


def read_adapter_config(source: Source, name: str) -> Any:
    """Return PEFT's config of an adapter; refuse one that is malformed or that a composition cannot run."""
    file = source.directory / "adapter_config.json"
    try:
        if file.stat().st_size > LARGEST:
            raise ValueError(f"it has {file.stat().st_size:,} bytes; expected at most {LARGEST:,}")
        content = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("expected a mapping")
        checked = _Lora if content.get("peft_type") == "LORA" else _AnyAdapter
        checked.model_validate(content)
        config = _read_by_peft(source)
    except ValidationError as error:
        why = explain(error, EXPECTED, lambda place: checked.model_fields)
        raise not_peft(source, name, why) from error
    except UNREADABLE as error:
        raise not_peft(source, name, short(error)) from error
    _check_method(config, source, name)
    return config


def _read_by_peft(source: Source) -> Any:
    from peft import PeftConfig

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # keys of other PEFT versions
        return PeftConfig.from_pretrained(str(source.directory))


def _check_method(config: Any, source: Source, name: str) -> None:
    if config.is_prompt_learning:
        raise MemberError(
            f"member {name!r}: {source.directory} is a {config.peft_type.value} adapter, which adds virtual tokens "
            "that the other members do not see. Expected LoRA or another adapter of the layers"
        )
    if getattr(config, "alora_invocation_tokens", None):
        raise MemberError(
            f"member {name!r}: {source.directory} is an activated LoRA (alora_invocation_tokens), which PEFT switches "
            "on by the tokens read; a composition cannot. Expected LoRA or another adapter of the layers"
        )


def not_peft(source: Source, name: str, why: str) -> MemberError:
    """Make the error for a config that PEFT cannot run."""
    return MemberError(f"member {name!r}: {source.directory / 'adapter_config.json'} is no PEFT configuration ({why})")


def largest_rank(config: Any) -> int:
    """Return the largest rank that a LoRA config asks for; 0 for other methods."""
    ranks = getattr(config, "rank_pattern", None) or {}
    own = getattr(config, "r", 0)
    return max([own if isinstance(own, int) else 0, *(rank for rank in ranks.values() if isinstance(rank, int))])


def short(error: Exception) -> str:
    """Tell an error of PEFT's in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    text = (lines[1] if len(lines) > 1 and lines[0].startswith("Error") else lines[0]).rstrip(".")
    return text if len(text) <= 300 else f"{text[:300]}…"
