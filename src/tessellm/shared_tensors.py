"""Tensors that several members hold in common: one copy in memory, one copy on disk.

Fine-tunes often leave part of the base as it was (frozen embeddings, untouched layers). Such tensors are found by
comparing them, bit for bit.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from .sources import weight_files


def share_identical(base: nn.Module, expert: nn.Module) -> None:
    """Let the expert use the base's parameters wherever the two are equal."""
    owners = {id(parameter) for parameter in base.parameters()}
    ours = dict(base.named_parameters(remove_duplicate=False))
    for name, parameter in list(expert.named_parameters(remove_duplicate=False)):
        twin = ours.get(name)
        if twin is None or id(parameter) in owners or type(twin) is not type(parameter):
            continue
        alike = (twin.shape, twin.dtype, twin.device) == (parameter.shape, parameter.dtype, parameter.device)
        if alike and not parameter.is_meta and torch.equal(twin, parameter):
            module, _, leaf = name.rpartition(".")
            setattr(expert.get_submodule(module), leaf, twin)


def unique_bytes(modules: Iterable[nn.Module]) -> int:
    """The bytes of all parameters and buffers, each piece of memory counted once."""
    seen: dict[tuple[torch.device, int], int] = {}
    for module in modules:
        for tensor in [*module.parameters(), *module.buffers()]:
            storage = tensor.untyped_storage()
            seen[tensor.device, storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())


def store_once(folders: Mapping[str, Path], shared_folder: Path) -> None:
    """Move tensors that several checkpoints hold in common into files of their own, named in every index.

    `folders` are complete checkpoints; afterwards each loads as before.
    """
    holders: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, folder in folders.items():
        for key, tensor in _stored_tensors(folder):
            holders[key, _digest(tensor)].append(name)
    groups: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for (key, _), sharers in holders.items():
        if len(sharers) > 1:
            groups[tuple(sharers)].add(key)
    if not groups:
        return
    index: dict[str, dict[str, str]] = {name: {} for name in folders}
    shared_folder.mkdir()
    for number, (names, keys) in enumerate(groups.items(), start=1):
        file = shared_folder / f"shared-{number:05d}.safetensors"
        save_file(dict(_stored_tensors(folders[names[0]], keys)), file, metadata={"format": "pt"})
        for name in names:
            index[name].update(dict.fromkeys(keys, os.path.relpath(file, folders[name])))
    for name, folder in folders.items():
        _keep_own(folder, index[name])


def _keep_own(folder: Path, shared: dict[str, str]) -> None:
    """Rewrite a checkpoint's files without the shared tensors, and its index with them."""
    weight_map = dict(shared)
    for file in weight_files(folder):
        with safe_open(file, "pt") as tensors:
            own = {key: tensors.get_tensor(key) for key in tensors.keys() if key not in shared}
        file.unlink()
        if own:
            save_file(own, file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(own, file.name))
    plain = folder / "model.safetensors"
    if plain.exists():  # a name that loaders prefer to an index
        plain.rename(folder / "model-own.safetensors")
        weight_map = {key: file.replace(plain.name, "model-own.safetensors") for key, file in weight_map.items()}
    content = {"metadata": {}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content, indent=1))


def _stored_tensors(folder: Path, keys: set[str] | None = None) -> Iterable[tuple[str, Tensor]]:
    for file in weight_files(folder):
        with safe_open(file, "pt") as tensors:
            for key in tensors.keys():
                if keys is None or key in keys:
                    yield key, tensors.get_tensor(key)


def _digest(tensor: Tensor) -> str:
    head = f"{tensor.dtype} {tuple(tensor.shape)} ".encode()
    return hashlib.sha256(head + tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
