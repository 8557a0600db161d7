"""Is a checkpoint's config.json one that its weights could have? A wrong number costs minutes, or a traceback.

Reads the config and the headers of weight files. What else a config says is left to transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open

from ..errors import MemberError
from ..validation import shown

LARGEST = 1 << 24  # what any of a model's sizes is below
ALWAYS_FINE = 1000  # layers; more need weights of their own
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
SIZES = (
    *LAYERS,
    *("hidden_size", "n_embd", "d_model", "intermediate_size", "vocab_size", "head_dim"),
    *("num_attention_heads", "n_head", "num_key_value_heads"),
)


def check_sizes(directory: Path, files: Sequence[Path], owner: str) -> None:
    """Refuse sizes that no model has, and more layers than there are tensors."""
    file = directory / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise MemberError(f"{owner}: {file} is cut off or damaged. Copy or download it again") from error
    if not isinstance(config, Mapping):
        raise MemberError(f"{owner}: {file} is damaged: expected a mapping. Copy or download it again")
    for part in (config, config.get("text_config")):
        for key, value in part.items() if isinstance(part, Mapping) else ():
            if key in SIZES and isinstance(value, int | float | str) and not _is_size(value):
                raise _wrong(owner, file, key, value, f"a whole number from 1 to {LARGEST - 1:,}")
            if key in LAYERS and _is_size(value) and value > max(ALWAYS_FINE, _count_tensors(files)):
                raise _wrong(owner, file, key, value, f"at most the {_count_tensors(files):,} tensors of its weights")


def _is_size(value: Any) -> bool:
    return type(value) is int and 1 <= value < LARGEST


def _wrong(owner: str, file: Path, key: str, value: Any, expected: str) -> MemberError:
    return MemberError(f"{owner}: {file}: {key}: expected {expected}; got {shown(value)}. Copy or download it again")


def _count_tensors(files: Sequence[Path]) -> int:
    total = 0
    for file in files:
        with safe_open(file, "pt") as tensors:
            total += len(tensors.keys())
    return total
