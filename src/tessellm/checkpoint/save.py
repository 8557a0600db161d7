"""Write a composition's folder, linked or self-contained."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Collection, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig

from .. import files
from ..errors import CheckpointError
from ..members import Member, SavedMember, adapters
from ..members.quantized import check_readable
from ..members.shared_tensors import store_once
from ..model import ComposedConfig, ComposedForCausalLM
from ..routing.router import DeltaRouter
from ..routing.stored import write_router
from ..rules import find_rule
from . import card
from .links import link
from .reader import ROUTER, is_composition

STUB = '''"""Lets `from_pretrained(folder, trust_remote_code=True)` find tessellm, which must be installed."""

from tessellm.model import ComposedConfig, ComposedForCausalLM

__all__ = ["ComposedConfig", "ComposedForCausalLM"]
'''
AUTO_MAP = {
    "AutoConfig": "modeling_tessellm.ComposedConfig",
    "AutoModelForCausalLM": "modeling_tessellm.ComposedForCausalLM",
}
OWN_FILES = (  # what a composition's folder may hold; a folder with anything else is never replaced
    *("config.json", "generation_config.json", "model.safetensors", "modeling_tessellm.py", "README.md"),
    ROUTER,
    *("members", "shared", "__pycache__", "tokenizer*", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.*", "merges.txt", "*.model", "chat_template*", "additional_chat_templates"),
)


def save(
    model: ComposedForCausalLM,
    target: str | Path,
    self_contained: bool = False,
    max_shard_size: str | int = "5GB",
    stored: Collection[str] = (),
) -> None:
    """Write a composition's folder; nothing is seen of it before all of it is written. `stored`: members whose weights
    the folder that is replaced holds, which are taken over as they are."""
    if find_rule(model.config.rule["name"]) is None:
        raise CheckpointError(
            f"the rule {model.config.rule['name']!r} is not in tessellm's table, so it cannot be saved"
        )
    if model.routing is not None and not isinstance(model.router, DeltaRouter | None):
        raise CheckpointError(
            f"the router {type(model.router).__name__} is your own and cannot be saved. Set model.router = None to "
            "save the rest, and set it again where the composition is loaded"
        )
    target = Path(os.path.realpath(Path(target).expanduser()))
    members = [SavedMember.model_validate(entry) for entry in model.config.members]
    if not self_contained:
        loaded = zip(members, model.loaded_members, strict=True)
        members = [link(saved, member, target) for saved, member in loaded]
    check_target(target)
    with files.new_directory(target, is_composition) as folder:
        if self_contained:
            _store_members([m for m in model.loaded_members if m.name not in stored], folder, max_shard_size)
            for place in [f"members/{member.name}" for member in members if member.name in stored]:
                take_over(target / place, folder / place)
            if stored and (target / "shared").is_dir():
                take_over(target / "shared", folder / "shared")
            members = [saved.placed(source=f"./members/{saved.name}") for saved in members]
        _write_config(model, members, folder)
        if model.tokenizer is not None:
            model.tokenizer.save_pretrained(folder)
        save_file(_own_tensors(model), folder / "model.safetensors", metadata={"format": "pt"})
        if isinstance(model.router, DeltaRouter) and model.routing is not None:
            write_router(model.router, folder / ROUTER)
        (folder / "modeling_tessellm.py").write_text(STUB)
        readme = card.model_card(cast(ComposedConfig, model.config), members, target.name, model.notes)
        (folder / "README.md").write_text(readme, encoding="utf-8")


def _write_config(model: ComposedForCausalLM, members: Sequence[SavedMember], folder: Path) -> None:
    config = ComposedConfig.from_dict(model.config.to_dict())
    config.members = [member.entry() for member in members]
    config.architectures = ["ComposedForCausalLM"]
    config.auto_map = dict(AUTO_MAP)
    config.notes = list(model.notes)
    config.save_pretrained(folder)
    _storable(model.generation_config).save_pretrained(folder)


def _storable(generation: GenerationConfig) -> GenerationConfig:
    """Drop settings without effect, which transformers refuses to write: of sampling or beams, if unused."""
    generation = copy.deepcopy(generation)
    idle: list[str] = []
    if not generation.do_sample:
        idle += ["temperature", "top_p", "top_k", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"]
    if (generation.num_beams or 1) == 1:
        idle += ["early_stopping", "length_penalty", "num_beam_groups", "diversity_penalty"]
    for key in idle:
        setattr(generation, key, None)
    return generation


def check_target(target: Path) -> None:
    """Refuse a folder that holds anything but a composition, before any work is done."""
    files.check_target(target, is_composition)
    names = [entry.name for entry in target.iterdir()] if target.is_dir() else []
    foreign = sorted(name for name in names if not any(fnmatch(name, own) for own in OWN_FILES))
    if foreign:
        raise CheckpointError(
            f"{target} holds a composition and also {foreign[0]}, which would be lost. Choose another name, or move it"
        )


def take_over(old: Path, new: Path, without: Sequence[str] = ()) -> None:
    """Copy a folder without copying its data, where the file system can."""

    def link_or_copy(source: str, target: str) -> None:
        try:
            os.link(source, target)
        except OSError:
            shutil.copy2(source, target)

    ignore = shutil.ignore_patterns(*without)
    shutil.copytree(old, new, copy_function=link_or_copy, ignore=ignore, dirs_exist_ok=True)


def _store_members(members: Sequence[Member], folder: Path, max_shard_size: str | int) -> None:
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


def _own_tensors(model: ComposedForCausalLM) -> dict[str, Tensor]:
    tensors = {"weights": torch.tensor(model.config.weights, dtype=torch.float64)}
    for name, alignment in model.alignments.items():
        if alignment.member_id_V is not None:
            tensors[f"vocabulary.{name}.member_id"] = alignment.member_id_V.cpu()
        if alignment.silent_U is not None:
            tensors[f"vocabulary.{name}.silent"] = alignment.silent_U.cpu()
    return tensors
