"""The members: one base in memory, every adapter around its tensors, and compositions of some of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tessellm.compose import assemble
from tessellm.demo.adapters import adapters_folder
from tessellm.errors import TessellmError
from tessellm.members import Loading, Member, MemberSpec, load_member
from tessellm.members.sources import digest, weight_files
from tessellm.model import ComposedForCausalLM
from tessellm.model.variants import in_place_of_all

from .skills import SKILLS, data_folder

TRAINED, BASE = "TESSELLM_REAL_TRAINED", "TESSELLM_REAL_BASE"  # environment variables


@dataclass(frozen=True)
class Places:
    """Where everything is. `trained` holds NAME-SEED as the training script writes them: those of another seed, one
    on all data, blends; what is not there is not measured."""

    data: Path
    adapters: Path
    trained: Path | None = None
    base: str = "smollm2"

    @classmethod
    def found(
        cls,
        data: Path | None = None,
        adapters: Path | None = None,
        trained: Path | None = None,
        base: str | None = None,
    ) -> Places:
        """As given, else as the environment says, else the repository's."""
        named = os.environ.get(TRAINED)
        trained = trained or (Path(named).expanduser() if named else None)
        if trained is not None and not trained.is_dir():
            raise TessellmError(f"there is no folder {trained} with further adapters. Leave out {TRAINED}, or mend it")
        return cls(data_folder(data), adapters_folder(adapters), trained, base or os.environ.get(BASE, "smollm2"))

    def extra(self, name: str, seed: int) -> Path | None:
        """The folder of a further adapter, if it is there."""
        folder = self.trained / f"{name}-{seed}" if self.trained is not None else None
        return folder if folder is not None and (folder / "adapter_config.json").is_file() else None

    def others(self, seed: int) -> dict[str, Path]:
        """The six of another seed; empty where one is missing."""
        found = {name: self.extra(name, seed) for name in SKILLS}
        return {name: path for name, path in found.items() if path} if all(found.values()) else {}


class Experts:
    """Adapters of one base, by name, and a composition of all of them."""

    def __init__(self, base: Member, adapters: Mapping[str, Path]):
        self.base, self.adapters = base, dict(adapters)
        self.base_name = base.source.name.rpartition("/")[2] if base.source else base.name
        self.identity = {name: digest(weight_files(folder)) for name, folder in adapters.items()}
        experts = [self.load(name, folder) for name, folder in adapters.items()]
        self.composed = assemble([base, *experts], "evidence")

    def load(self, name: str, folder: Path) -> Member:
        """An adapter of the base, around its tensors."""
        return load_member(name, MemberSpec(folder, device=self.base.spec.device), self.base, Loading())

    def in_place_of_all(self, name: str, folder: Path) -> ComposedForCausalLM:
        """One adapter that stands for all of them."""
        return in_place_of_all(self.composed, name, self.load(name.replace(" ", "-"), folder).model)


def load_base(places: Places, device: str) -> Member:
    """The base, in float32: in half precision rounding parts a third of long texts that are the same otherwise."""
    return load_member("base", MemberSpec(places.base, device=device), None, Loading(dtype="float32"))
