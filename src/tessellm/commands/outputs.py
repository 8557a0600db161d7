"""Files that a command writes: none of them may be one that it reads, nor a model's. Said before any work is done."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from ..errors import CheckpointError

OUTPUTS = {
    "json_path": "--json",
    "report": "--out",
    "figure": "--figure",
    "plot": "--plot",
}  # parameters that are files to write
MODEL_FILES = (  # of a checkpoint, an adapter or a composition
    *("*.safetensors", "*.gguf", "*.index.json", "config.json", "adapter_config.json", "generation_config.json"),
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model"),
    *("chat_template*", "modeling_*.py", "README.md"),
)


def check_outputs(parameters: Mapping[str, Any]) -> None:
    """Refuse an output that would overwrite an input, a file of a model, or another output."""
    outputs = {option: Path(parameters[name]) for name, option in OUTPUTS.items() if parameters.get(name) is not None}
    inputs = [path for name, value in parameters.items() if name not in OUTPUTS for path in _files(value)]
    seen: dict[str, str] = {}
    for option, output in outputs.items():
        if (place := os.path.realpath(output)) in seen and not output.is_char_device():
            raise CheckpointError(f"{option} and {seen[place]} name the same file, {output}. Choose another for one")
        seen[place] = option
        if not output.is_file():
            continue
        if any(output.samefile(path) for path in inputs):
            raise CheckpointError(f"{option} would overwrite {output}, which this command reads. Choose another name")
        if any(fnmatch(output.name, pattern) for pattern in MODEL_FILES) and _in_model(output):
            raise CheckpointError(f"{option} would overwrite {output}, a file of a model. Choose another name")


def _files(value: Any) -> Iterator[Path]:
    """List the files that a parameter names."""
    values: Iterable[Any] = value if isinstance(value, list | tuple) else [value]
    for each in values:
        try:
            if isinstance(each, str | Path) and Path(each).is_file():
                yield Path(each)
        except (OSError, ValueError):  # a prompt, longer than any name
            continue


def _in_model(file: Path) -> bool:
    """Whether a file lies beside weights, or holds some."""
    return file.suffix == ".gguf" or any(file.resolve().parent.glob("*.safetensors"))
