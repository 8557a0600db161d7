"""A model to look into: a composition, or any Hugging Face model as its own class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoModel

from tessellm.errors import MemberError
from tessellm.load import load_model
from tessellm.members import Loading, MemberSpec, dtype_of, load_member, load_tokenizer, sources
from tessellm.members.load import UNLOADABLE


def load_any(path: str, device: str | None = None, dtype: str | None = None) -> tuple[Any, Any]:
    """A composition from its folder, hub id or recipe, or any other model, and its tokenizer."""
    if Path(path).suffix in (".yaml", ".yml", ".json") and not Path(path).is_dir():
        model = load_model(path, device, dtype)
        return model, model.tokenizer
    source = sources.find(path, "the model")
    config = _config_of(source.directory)
    if config.get("model_type") == "tessellm":
        model = load_model(path, device, dtype)
        return model, model.tokenizer
    if source.file is not None:
        member = load_member("model", MemberSpec(source.path, dtype=dtype, device=device), None, Loading())
        return member.model, member.tokenizer
    sources.check_files(source.directory, "the model")
    if source.is_adapter:
        raise MemberError(f"{path} is an adapter. Put it and its base into a recipe, and probe that")
    kind: Any = getattr(transformers, (config.get("architectures") or ["AutoModel"])[0], AutoModel)
    try:
        model = kind.from_pretrained(
            source.directory, dtype=dtype_of(dtype) if dtype else "auto", device_map=device, use_safetensors=True
        )
    except UNLOADABLE as error:
        raise MemberError(f"{path} cannot be loaded: {' '.join(str(error).split())[:400]}") from error
    return model.eval(), load_tokenizer(source.directory, Loading())


def _config_of(folder: Path) -> dict[str, Any]:
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # an adapter, or nothing that can be loaded: said below
    return content if isinstance(content, dict) else {}
