"""Merged: the merges of one composition's members, made as they are needed and loaded as columns.

Members that are no full checkpoints (adapters, models that were given loaded) are first written as such.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from transformers import PreTrainedModel

from tessellm.errors import MemberError, require
from tessellm.files import new_directory
from tessellm.members import Loading, Member, MemberSpec, load_member
from tessellm.model import ComposedForCausalLM
from tessellm.model.variants import in_place_of_all

from .merges import check_method, merge


class Merged:
    """Merges of a composition, in a folder: FOLDER/members/NAME and FOLDER/METHOD-λ."""

    def __init__(self, model: ComposedForCausalLM, folder: Path, seed: int = 0):
        require("mergekit", "merge")
        self.model, self.folder, self.seed = model, folder, seed
        for member in model.loaded_members:
            _check(member, model)

    def check(self, method: str, strengths: Sequence[float]) -> None:
        """Complain before anything is merged."""
        for strength in (None, *strengths):
            check_method(method, len(self.model.members) - 1, strength)

    def load(self, method: str, strength: float | None) -> ComposedForCausalLM:
        """A merge as a column; made, if it is not there yet."""
        target = self.path(method, strength)
        if not target.is_dir():
            base, *experts = (self._checkpoint(member) for member in self.model.loaded_members)
            names = [member.name for member in self.model.loaded_members[1:]]
            dtype = str(self.model.dtype).removeprefix("torch.")
            merge(method, base, dict(zip(names, experts, strict=True)), target, strength, self.seed, dtype)
        base_member = self.model.loaded_members[0]
        loading = Loading(attn_implementation=base_member.model.config._attn_implementation)
        spec = MemberSpec(target, device=base_member.spec.device)
        return in_place_of_all(self.model, method, load_member(method, spec, None, loading).model)

    @contextmanager
    def for_once(self, method: str, strength: float | None) -> Iterator[ComposedForCausalLM]:
        """The same, and its files removed afterwards: a merge is as large as a member."""
        yield self.load(method, strength)
        shutil.rmtree(self.path(method, strength), ignore_errors=True)

    def path(self, method: str, strength: float | None) -> Path:
        return self.folder / (method if strength is None else f"{method}-{strength:g}")

    def _checkpoint(self, member: Member) -> str:
        if member.source is not None and member.source.file is None and not member.source.is_adapter:
            return str(member.source.directory)
        target = self.folder / "members" / member.name
        if not target.is_dir():
            with new_directory(target, lambda folder: True) as folder:
                _whole(member).save_pretrained(folder)
        return str(target)


def _check(member: Member, model: ComposedForCausalLM) -> None:
    if getattr(member.model, "is_quantized", False):
        raise MemberError(
            f"member {member.name!r} is quantized; merging averages weights, so it needs them whole. Load it without "
            "quantization, or leave the merges out"
        )
    if model.alignments[member.name].member_id_V is not None:
        raise MemberError(
            f"member {member.name!r} numbers its tokens otherwise than the base, so its embeddings cannot be averaged "
            "with the base's. Leave the merges out"
        )


def _whole(member: Member) -> PreTrainedModel:
    """The member as one full model; an adapter is merged into a copy of its base, by PEFT."""
    if not member.is_adapter:
        return member.model
    adapted = copy.deepcopy(vars(member.model)["_peft_model"]).merge_and_unload()
    vars(adapted).pop("peft_config", None)
    return adapted
