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

import copy
import json
import os
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GenerationConfig

from . import adapters, files, sources
from .compose import assemble, check_termination, load_members, make_loading, place, rule_entry
from .config import ComposedConfig
from .errors import CheckpointError
from .links import link, saved_member
from .members import Member, load_tokenizer
from .model import ComposedForCausalLM
from .model_card import model_card
from .quantized import check_readable
from .rules import RULES
from .shared_tensors import store_once
from .vocabulary import Alignment, Vocabulary

STUB = '''"""Lets `from_pretrained(folder, trust_remote_code=True)` find tessellm, which must be installed."""

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
    "low_cpu_mem_usage": True,
}
OWN_FILES = (  # what a composition's folder may hold; a folder with anything else is never replaced
    *("config.json", "generation_config.json", "model.safetensors", "modeling_tessellm.py", "README.md"),
    *("members", "shared", "__pycache__", "tokenizer*", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.*", "merges.txt", "*.model", "chat_template*", "additional_chat_templates"),
)


def save(
    model: ComposedForCausalLM, target: str | Path, self_contained: bool = False, max_shard_size: str | int = "5GB"
) -> None:
    """Write a composition's folder; nothing is seen of it before all of it is written."""
    if model.config.rule["name"] not in RULES:
        raise CheckpointError(
            f"the rule {model.config.rule['name']!r} is not in tessellm's table, so it cannot be saved"
        )
    target = Path(os.path.realpath(Path(target).expanduser()))
    entries = [] if self_contained else [link(member, target) for member in model.loaded_members]
    check_target(target)
    with files.new_directory(target, is_composition) as folder:
        if self_contained:
            entries = _store_members(model.loaded_members, folder, max_shard_size)
        _write_config(model, entries, folder)
        if model.tokenizer is not None:
            model.tokenizer.save_pretrained(folder)
        save_file(_own_tensors(model), folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "modeling_tessellm.py").write_text(STUB)
        card = model_card(ComposedConfig.from_pretrained(folder), target.name, model.notes)
        (folder / "README.md").write_text(card, encoding="utf-8")


def _write_config(model: ComposedForCausalLM, entries: list[dict[str, Any]], folder: Path) -> None:
    config = ComposedConfig.from_dict(model.config.to_dict())
    config.members = [
        {key: member[key] for key in ("name", "kind", "weight", "end_ids")} | entry
        for member, entry in zip(config.members, entries, strict=True)
    ]
    config.architectures = ["ComposedForCausalLM"]
    config.auto_map = dict(AUTO_MAP)
    config.notes = list(model.notes)
    config.save_pretrained(folder)
    _storable(model.generation_config).save_pretrained(folder)


def _read_generation(folder: Path) -> GenerationConfig:
    try:
        return GenerationConfig.from_pretrained(folder)
    except (OSError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{folder / 'generation_config.json'} is missing, cut off or damaged. Compose again"
        ) from error


def _storable(generation: GenerationConfig) -> GenerationConfig:
    """Without settings that have no effect, which transformers refuses to write: sampling's or beams', if unused."""
    generation = copy.deepcopy(generation)
    idle: list[str] = []
    if not generation.do_sample:
        idle += ["temperature", "top_p", "top_k", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"]
    if (generation.num_beams or 1) == 1:
        idle += ["early_stopping", "length_penalty", "num_beam_groups", "diversity_penalty"]
    for key in idle:
        setattr(generation, key, None)
    return generation


def is_composition(folder: Path) -> bool:
    try:
        return json.loads((folder / "config.json").read_text())["model_type"] == ComposedConfig.model_type
    except (OSError, ValueError, KeyError, TypeError):
        return False


def check_target(target: Path) -> None:
    """Refuse a folder that holds anything but a composition, before any work is done."""
    files.check_target(target, is_composition)
    names = [entry.name for entry in target.iterdir()] if target.is_dir() else []
    foreign = sorted(name for name in names if not any(fnmatch(name, own) for own in OWN_FILES))
    if foreign:
        raise CheckpointError(
            f"{target} holds a composition and also {foreign[0]}, which would be lost. Choose another name, or move it"
        )


def load(path: str | Path, *, config: ComposedConfig | None = None, **options: Any) -> ComposedForCausalLM:
    """Read a composition's folder, or a hub repository that holds one."""
    revision, device_map = options.pop("revision", None), options.pop("device_map", None)
    loading = make_loading(options)
    source = sources.find(path, "the composition", revision, nested=True, **loading.download_options())
    folder = source.directory
    if config is None:
        config = read_config(folder)
    else:
        check_config(config, folder / "config.json")
    specs = {entry["name"]: saved_member(entry, folder, loading) for entry in config.members}
    members = load_members(place(specs, device_map), loading)
    tensors = read_own_tensors(folder)
    alignments = {name: saved_alignment(tensors, name, config.vocab_size) for name in specs}
    ends = {entry["name"]: tuple(entry["end_ids"]) for entry in config.members}
    vocabulary = Vocabulary(config.vocab_size, alignments, ends, (), None)
    model = assemble(members, config.rule, config.termination, vocabulary)
    for key in ("max_position_embeddings", "pad_token_id", "bos_token_id", "use_cache"):
        setattr(model.config, key, getattr(config, key))
    model.config.eos_token_id = config.eos_token_id  # as saved: a user may have changed where it stops
    model.generation_config = _read_generation(folder)
    model.tokenizer = load_tokenizer(folder, loading)
    model.notes = tuple(getattr(config, "notes", model.notes))
    model.config._name_or_path = model.name_or_path = str(folder)
    return model


def read_config(folder: Path) -> ComposedConfig:
    file = folder / "config.json"
    if is_composition(folder):
        config = ComposedConfig.from_pretrained(folder)
        check_config(config, file)
        return config
    try:
        kind = json.loads(file.read_text()).get("model_type")
    except FileNotFoundError:
        raise CheckpointError(f"{folder} holds no composition: there is no config.json in it") from None
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{file} is cut off or damaged. Compose again") from error
    raise CheckpointError(
        f"{folder} holds no composition but a model of type {kind!r}. Expected a folder written by `tessellm compose`, "
        "or a recipe"
    )


def check_config(config: ComposedConfig, file: Path) -> None:
    """Refuse what a hand or another program wrote into config.json and no composition can be."""
    if not isinstance(config.members, list) or len(config.members) < 2 or not isinstance(config.rule, Mapping):
        raise CheckpointError(f"{file} is damaged: expected a rule, a base and at least one expert. Compose again")
    rule_entry(config.rule)
    check_termination(config.termination)


def load_as_hugging_face(path: str | Path, **options: Any) -> Any:
    """`load`, with the arguments that Hugging Face libraries pass to `from_pretrained`."""
    report = options.pop("output_loading_info", False)
    options.pop("adapter_kwargs", None)  # AutoModel passes where it looked for adapters
    for key, neutral in NEUTRAL_OPTIONS.items():
        value = options.pop(key, neutral)
        if value not in (neutral, None):
            raise TypeError(f"a composition cannot be loaded with {key}={value!r}")
    config = options.get("config")
    if config is not None and config._attn_implementation is not None:
        options["attn_implementation"] = config._attn_implementation  # where AutoModel puts what it was given
    if "torch_dtype" in options:
        options["dtype"] = options.pop("torch_dtype")
    if Path(path).is_dir():
        options.pop("revision", None)  # which Hugging Face libraries pass for folders too
    model = load(path, **options)
    return (model, {"missing_keys": set(), "unexpected_keys": set(), "mismatched_keys": set()}) if report else model


def _store_members(members: tuple[Member, ...], folder: Path, max_shard_size: str | int) -> list[dict[str, Any]]:
    plain = {}
    for member in members:
        check_readable(member.model, member.name)
        place = folder / "members" / member.name
        if member.is_adapter:
            adapters.save_adapter(member.model, place)
            continue
        kept, member.model.generation_config = member.model.generation_config, _storable(member.model.generation_config)
        try:
            member.model.save_pretrained(place, max_shard_size=max_shard_size)
        finally:
            member.model.generation_config = kept
        if not getattr(member.model, "is_quantized", False):
            plain[member.name] = place
    store_once(plain, folder / "shared", max_shard_size)
    return [{"source": f"./members/{member.name}"} for member in members]


def _own_tensors(model: ComposedForCausalLM) -> dict[str, Tensor]:
    tensors = {"weights": torch.tensor(model.config.weights, dtype=torch.float64)}
    for name, alignment in model.alignments.items():
        if alignment.member_id_V is not None:
            tensors[f"vocabulary.{name}.member_id"] = alignment.member_id_V.cpu()
        if alignment.silent_U is not None:
            tensors[f"vocabulary.{name}.silent"] = alignment.silent_U.cpu()
    return tensors


def read_own_tensors(folder: Path) -> dict[str, Tensor]:
    problem = sources.safetensors_problem(folder / "model.safetensors")
    if problem:
        raise CheckpointError(f"{folder / 'model.safetensors'} {problem}. Compose again")
    return load_file(folder / "model.safetensors")


def saved_alignment(tensors: Mapping[str, Tensor], name: str, size: int) -> Alignment:
    return Alignment(tensors.get(f"vocabulary.{name}.member_id"), size, tensors.get(f"vocabulary.{name}.silent"))
