"""Read a composition's folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor
from transformers import GenerationConfig

from ..compose import assemble, check_termination, load_members, make_loading, place, rule_entry
from ..errors import CheckpointError
from ..members import load_tokenizer, sources
from ..model import ComposedConfig, ComposedForCausalLM
from ..vocabulary import Alignment, Vocabulary
from .links import saved_member

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


def is_composition(folder: Path) -> bool:
    try:
        return json.loads((folder / "config.json").read_text())["model_type"] == ComposedConfig.model_type
    except (OSError, ValueError, KeyError, TypeError):
        return False


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


def _read_generation(folder: Path) -> GenerationConfig:
    try:
        return GenerationConfig.from_pretrained(folder)
    except (OSError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{folder / 'generation_config.json'} is missing, cut off or damaged. Compose again"
        ) from error


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


def read_own_tensors(folder: Path) -> dict[str, Tensor]:
    problem = sources.safetensors_problem(folder / "model.safetensors")
    if problem:
        raise CheckpointError(f"{folder / 'model.safetensors'} {problem}. Compose again")
    return load_file(folder / "model.safetensors")


def saved_alignment(tensors: Mapping[str, Tensor], name: str, size: int) -> Alignment:
    return Alignment(tensors.get(f"vocabulary.{name}.member_id"), size, tensors.get(f"vocabulary.{name}.silent"))
