"""Read a composition's folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor
from transformers import GenerationConfig

from ..compose import assemble, load_members, make_loading, place
from ..errors import CheckpointError, MemberError
from ..members import load_tokenizer, sources
from ..model import ComposedConfig, ComposedForCausalLM
from ..model.variants import no_such_speaker
from ..routing.calibrated import prepare_router
from ..routing.calibration import Progress
from ..routing.router import OutdatedRouterError
from ..routing.stored import read_router
from ..rules import Product
from ..vocabulary import Alignment, Vocabulary
from .links import saved_spec
from .reader import ROUTER, read_config, renewed, saved_members

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


def load(
    path: str | Path,
    *,
    config: ComposedConfig | None = None,
    only: str | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> ComposedForCausalLM:
    """Read a composition's folder, or a hub repository that holds one. `only`: no member but that one and the base,
    which an adapter needs; they are then composed by Eq. 2."""
    revision, device_map = options.pop("revision", None), options.pop("device_map", None)
    loading = make_loading(options)
    source = sources.find(path, "the composition", revision, nested=True, **loading.download_options())
    folder = source.directory
    config = renewed(config or read_config(folder))
    saved, rule = saved_members(config, folder), config.rule
    if only is not None:
        names = [member.name for member in saved]
        if only not in names:
            raise MemberError(no_such_speaker(f"{path}:{only}", str(path), names))
        saved = [member for member in saved if member.name in (names[0], only)]
        rule = {"name": Product.name}
    specs = {member.name: saved_spec(member, folder, loading) for member in saved}
    members = load_members(place(specs, device_map), loading)
    tensors = read_own_tensors(folder)
    alignments = {name: saved_alignment(tensors, name, config.vocab_size) for name in specs}
    ends = {member.name: tuple(member.end_ids) for member in saved}
    vocabulary = Vocabulary(config.vocab_size, alignments, ends, (), None)
    model = assemble(members, rule, vocabulary)
    for key in ("routing", "max_position_embeddings", "pad_token_id", "bos_token_id", "use_cache"):
        setattr(model.config, key, getattr(config, key))
    model.config.eos_token_id = config.eos_token_id  # as saved: a user may have changed where it stops
    model.generation_config = _read_generation(folder)
    model.tokenizer = load_tokenizer(folder, loading)
    model.notes = tuple(getattr(config, "notes", model.notes))
    _restore_router(model, folder / ROUTER, progress)
    model.config._name_or_path = model.name_or_path = str(folder)
    return model


def _restore_router(model: ComposedForCausalLM, file: Path, progress: Progress | None) -> None:
    """Read the stored router, or calibrate one where there is none, or one of another version."""
    if model.routing is not None and file.is_file():
        try:
            model.router = read_router(file, model.base, model.tokenizer)
            return
        except OutdatedRouterError:
            note = "The stored router is of another version and was calibrated anew. Save the composition to keep it"
            model.notes = (*model.notes, note)
    prepare_router(model, progress)


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
