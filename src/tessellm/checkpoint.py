"""A composition on disk: save and load, linked or self-contained.

    config.json             members, weights, rule; where each member is and what it was when it was saved
    model.safetensors       the experts' weights in the rule and, where ids are permuted, the id maps
    tokenizer…, generation_config.json, chat_template.jinja
    modeling_tessellm.py    lets `trust_remote_code=True` load it without `import tessellm`
    README.md               a model card
    members/NAME/           self-contained only: every member as a checkpoint or adapter of its own
    shared/                 self-contained only: tensors that several members have in common

A linked folder names its members by hub id and revision, or by a path relative to itself.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from . import adapters, sources
from .compose import assemble, load_members, make_loading
from .errors import CheckpointError
from .files import new_directory
from .members import Loading, Member, MemberSpec
from .model import ComposedConfig, ComposedForCausalLM
from .model_card import model_card
from .rules import RULES
from .shared_tensors import store_once
from .vocabulary import Alignment, Vocabulary

STUB = '''"""Lets AutoModelForCausalLM.from_pretrained(..., trust_remote_code=True) : pip install tessellm"""

from tessellm.model import ComposedConfig, ComposedForCausalLM

__all__ = ["ComposedConfig", "ComposedForCausalLM"]
'''
AUTO_MAP = {
    "AutoConfig": "modeling_tessellm.ComposedConfig",
    "AutoModelForCausalLM": "modeling_tessellm.ComposedForCausalLM",
}

NEUTRAL_OPTIONS: dict[str, Any] = {  # what Hugging Face libraries pass without meaning anything by it
    "subfolder": "",
    "gguf_file": None,
    "use_safetensors": True,
    "force_download": False,
    "state_dict": None,
    "_from_auto": True,
    "commit_hash": None,
    "_commit_hash": None,
    "code_revision": None,
    "offload_folder": None,
    "max_memory": None,
    "experts_implementation": None,
}


def save(
    model: ComposedForCausalLM, target: str | Path, self_contained: bool = False, max_shard_size: str = "5GB"
) -> None:
    """Write a composition's folder; nothing is seen of it before all of it is written."""
    if model.config.rule["name"] not in RULES:
        raise CheckpointError(
            f"the rule {model.config.rule['name']!r} is not in tessellm's table, so it cannot be saved"
        )
    target = Path(os.path.abspath(Path(target).expanduser()))
    entries = [] if self_contained else [_link(member, target) for member in model.loaded_members]
    with new_directory(target, is_composition) as folder:
        if self_contained:
            entries = _store_members(model.loaded_members, folder, max_shard_size)
        config = ComposedConfig.from_dict(model.config.to_dict())
        config.members = [{**ours, **theirs} for ours, theirs in zip(config.members, entries, strict=True)]
        config.architectures = ["ComposedForCausalLM"]
        config.auto_map = dict(AUTO_MAP)
        config.save_pretrained(folder)
        model.generation_config.save_pretrained(folder)
        if model.tokenizer is not None:
            model.tokenizer.save_pretrained(folder)
        save_file(_own_tensors(model), folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "modeling_tessellm.py").write_text(STUB)
        (folder / "README.md").write_text(model_card(config, target.name, model.notes), encoding="utf-8")


def is_composition(folder: Path) -> bool:
    try:
        return json.loads((folder / "config.json").read_text())["model_type"] == ComposedConfig.model_type
    except (OSError, ValueError, KeyError, TypeError):
        return False


def load(path: str | Path, *, config: ComposedConfig | None = None, **options: Any) -> ComposedForCausalLM:
    """Read a composition's folder, or a hub repository that holds one."""
    revision, device_map = options.pop("revision", None), options.pop("device_map", None)
    loading = make_loading(options)
    source = sources.find(path, "composition", revision, nested=True, **loading.download_options())
    folder = source.directory
    if not is_composition(folder):
        raise CheckpointError(f"{folder} holds no composition: expected a config.json with model_type 'tessellm'")
    config = config or ComposedConfig.from_pretrained(folder)
    specs = {entry["name"]: _member_spec(entry, folder, device_map) for entry in config.members}
    members = load_members(specs, loading)
    tensors = _read_own_tensors(folder)
    alignments = {name: _alignment(tensors, name, config.vocab_size) for name in specs}
    vocabulary = Vocabulary(config.vocab_size, alignments, tuple(config.eos_token_id or ()), (), None)
    model = assemble(members, config.rule, config.termination, vocabulary)
    return _finish(model, config, folder, loading)


def load_as_hugging_face(path: str | Path, **options: Any) -> Any:
    """`load`, with the arguments that Hugging Face libraries pass to `from_pretrained`."""
    report = options.pop("output_loading_info", False)
    options.pop("adapter_kwargs", None)  # AutoModel passes where it looked for adapters
    for key, neutral in NEUTRAL_OPTIONS.items():
        value = options.pop(key, neutral)
        if value not in (neutral, None):
            raise TypeError(f"a composition cannot be loaded with {key}={value!r}")
    if "torch_dtype" in options:
        options["dtype"] = options.pop("torch_dtype")
    model = load(path, **options)
    return (model, {"missing_keys": set(), "unexpected_keys": set(), "mismatched_keys": set()}) if report else model


def _finish(model: ComposedForCausalLM, config: ComposedConfig, folder: Path, loading: Loading) -> ComposedForCausalLM:
    from transformers import GenerationConfig

    from .members import load_tokenizer

    model.generation_config = GenerationConfig.from_pretrained(folder)
    model.tokenizer = load_tokenizer(folder, loading)
    model.config._name_or_path = model.name_or_path = str(folder)
    return model


@dataclass(frozen=True)
class _Stamp:
    """What a member's weights were when it was linked: quick to compare if untouched, exact if not."""

    sha256: str
    bytes: int
    changed_ns: int

    @classmethod
    def of(cls, files: list[Path]) -> _Stamp:
        return cls(sources.digest(files), *cls.quick(files))

    @staticmethod
    def quick(files: list[Path]) -> tuple[int, int]:
        stats = [file.stat() for file in files]
        return sum(stat.st_size for stat in stats), max(stat.st_mtime_ns for stat in stats)

    def matches(self, files: list[Path]) -> bool:
        return (self.bytes, self.changed_ns) == self.quick(files) or self.sha256 == sources.digest(files)


def _link(member: Member, target: Path) -> dict[str, Any]:
    if member.source is None:
        raise CheckpointError(
            f"member {member.name!r} was given as a loaded model, so there is nothing to link to. Save with "
            "self_contained=True, or compose from folders"
        )
    if member.source.hub_id is not None:
        return {"source": member.source.hub_id, "revision": member.source.revision}
    files = sources.weight_files(member.source.directory)
    path = Path(os.path.relpath(member.source.directory, target)).as_posix()
    return {"source": path if path.startswith(".") else f"./{path}", "stamp": vars(_Stamp.of(files))}


def _store_members(members: tuple[Member, ...], folder: Path, max_shard_size: str) -> list[dict[str, Any]]:
    full = {member.name: folder / "members" / member.name for member in members if not member.is_adapter}
    for member in members:
        if member.is_adapter:
            adapters.save_adapter(member.model, folder / "members" / member.name)
        else:
            member.model.save_pretrained(full[member.name], max_shard_size=max_shard_size)
    store_once(full, folder / "shared")
    return [{"source": f"./members/{member.name}", "revision": None} for member in members]


def _own_tensors(model: ComposedForCausalLM) -> dict[str, Tensor]:
    tensors = {"weights": torch.tensor(model.config.weights, dtype=torch.float64)}
    for name, alignment in model.alignments.items():
        if alignment.member_id_V is not None:
            tensors[f"vocabulary.{name}.member_id"] = alignment.member_id_V.cpu()
        if alignment.silent_U is not None:
            tensors[f"vocabulary.{name}.silent"] = alignment.silent_U.cpu()
    return tensors


def _read_own_tensors(folder: Path) -> dict[str, Tensor]:
    problem = sources.safetensors_problem(folder / "model.safetensors")
    if problem:
        raise CheckpointError(f"{folder / 'model.safetensors'} {problem}. Compose again")
    return load_file(folder / "model.safetensors")


def _alignment(tensors: Mapping[str, Tensor], name: str, size: int) -> Alignment:
    return Alignment(tensors.get(f"vocabulary.{name}.member_id"), size, tensors.get(f"vocabulary.{name}.silent"))


def _member_spec(entry: Mapping[str, Any], folder: Path, device_map: Any) -> MemberSpec:
    """Where a member of a saved composition is; refused if it is gone or no longer what it was."""
    name, source = entry["name"], entry.get("source")
    if not source:
        raise CheckpointError(f"{folder / 'config.json'} does not say where member {name!r} is")
    if source.startswith("."):
        path = Path(os.path.normpath(folder / source))
        if not path.is_dir():
            raise CheckpointError(
                f"member {name!r} is missing: {folder} links to {path}, which is not there. Move it back, "
                "or compose again"
            )
        files = sources.check_files(path, name)
        if "stamp" in entry and not _Stamp(**entry["stamp"]).matches(files):
            raise CheckpointError(
                f"member {name!r} has changed since it was composed: {path} holds other weights. "
                "Compose again to take them"
            )
        source = str(path)
    device = device_map.get(name) if isinstance(device_map, Mapping) else device_map
    return MemberSpec(
        source,
        weight=entry["weight"],
        revision=entry.get("revision"),
        device=device,
        quantization=entry.get("quantization"),
        any_base=True,  # checked when it was composed
    )
