"""Tensors that several members hold in common: one copy in memory, one copy on disk.

Fine-tunes often leave part of the base as it was (frozen embeddings, untouched layers). Such tensors are found by
comparing them, bit for bit.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.utils.hub import convert_file_size_to_int

from .sources import weight_files


def share_identical(base: nn.Module, expert: nn.Module) -> None:
    """Let the expert use the base's parameters wherever the two are equal.

    Only plain parameters: a quantized one may have equal codes and other scales.
    """
    ours = dict(base.named_parameters(remove_duplicate=False))
    for name, parameter in list(expert.named_parameters(remove_duplicate=False)):
        twin = ours.get(name)
        if twin is not None and twin is not parameter and _is_same(twin, parameter):
            module, _, leaf = name.rpartition(".")
            setattr(expert.get_submodule(module), leaf, twin)


def _is_same(ours: nn.Parameter, theirs: nn.Parameter) -> bool:
    if type(ours) is not nn.Parameter or type(theirs) is not nn.Parameter or ours.is_meta or theirs.is_meta:
        return False
    alike = (ours.shape, ours.dtype, ours.device) == (theirs.shape, theirs.dtype, theirs.device)
    return alike and torch.equal(ours, theirs)


def unique_bytes(modules: Iterable[nn.Module]) -> int:
    """Count the bytes of all parameters and buffers, each piece of memory once."""
    seen: dict[tuple[torch.device, int], int] = {}
    for module in modules:
        for tensor in [*module.parameters(), *module.buffers()]:
            for part in _plain_parts(tensor):
                storage = part.untyped_storage()
                seen[part.device, storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())


def _plain_parts(tensor: Any) -> Iterable[Tensor]:
    """List the tensors with memory of their own in a tensor; quantized ones hold several."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        yield from _plain_parts(getattr(tensor, name))


def store_once(folders: Mapping[str, Path], shared_folder: Path, max_shard_size: str | int) -> None:
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
    for names, keys in groups.items():
        for shard in _shards(_stored_tensors(folders[names[0]], keys), max_shard_size):
            file = shared_folder / f"shared-{len(list(shared_folder.iterdir())) + 1:05d}.safetensors"
            save_file(shard, file, metadata={"format": "pt"})
            for name in names:
                index[name].update(dict.fromkeys(shard, os.path.relpath(file, folders[name])))
    for name, folder in folders.items():
        _keep_own(folder, index[name])


def _shards(tensors: Iterable[tuple[str, Tensor]], max_shard_size: str | int) -> Iterator[dict[str, Tensor]]:
    limit = convert_file_size_to_int(max_shard_size)
    shard: dict[str, Tensor] = {}
    size = 0
    for key, tensor in tensors:
        if shard and size + tensor.nbytes > limit:
            yield shard
            shard, size = {}, 0
        shard[key] = tensor
        size += tensor.nbytes
    yield shard


def _keep_own(folder: Path, shared: dict[str, str]) -> None:
    """Rewrite a checkpoint's files without the shared tensors, and its index with them."""
    weight_map = dict(shared)
    for number, file in enumerate(weight_files(folder), start=1):
        with safe_open(file, "pt") as tensors:
            own = {key: tensors.get_tensor(key) for key in tensors.keys() if key not in shared}
        file.unlink()
        rewritten = folder / f"own-{number:05d}.safetensors"  # model.safetensors would hide the index
        if own:
            save_file(own, rewritten, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(own, rewritten.name))
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
    return hashlib.sha256(head + tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
