"""One pass of the base over each prompt, kept on disk: all that any router of the table goes by.

Of a prompt: what the library's tap collects, and for the peers, per layer and expert, how an adapter's ΔW acts on the
layer's input x. A file per prompt, named by its tokens, in a folder named by what the numbers depend on: a run that was
stopped goes on, and a router's column costs no pass.

Shapes: T tokens from the last user message on, K experts, M layers that any expert adapts.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tessellm.files import new_file
from tessellm.members.lora_layers import LoraDelta, read_lora
from tessellm.routing import energy
from tessellm.routing.directions import linear_layers
from tessellm.routing.route import RoutedPrompt
from tessellm.routing.router import DeltaRouter

Log = Callable[[str], None]
BATCH_TOKENS = 1024


@dataclass(frozen=True)
class Reading:
    """What one pass of the base says of a prompt."""

    ids: Sequence[int]
    user: slice
    energy_TK: Tensor
    last_MK: Tensor  # ‖ΔW x‖ at the last token; NaN where an expert has no such layer
    mean_MK: Tensor  # its mean over the tokens
    first_MK: Tensor  # the mean over the tokens of |v·x|, v the first right singular vector of ΔW

    def routed(self, experts: Sequence[int]) -> RoutedPrompt:
        """Return what a router of these experts sees."""
        return RoutedPrompt(self.ids, self.user, self.energy_TK[..., list(experts)])


@dataclass(frozen=True)
class Factors:
    """ΔW of all experts at one layer: right singular vectors times singular values, expert by expert."""

    rows_RI: Tensor
    owner_R: Tensor
    experts: Tensor
    first: Tensor  # the place of each expert's first row
    sigma: Tensor  # and its singular value

    @classmethod
    def of(cls, deltas: Mapping[int, Any]) -> Factors:
        rows, owner, first, sigma = list[Tensor](), list[int](), list[int](), list[float]()
        for delta in deltas.values():
            small = torch.linalg.qr(delta.up_OR.float()).R @ delta.down_RI.float()
            _, values, right = torch.linalg.svd(small, full_matrices=False)
            first.append(len(owner))
            sigma.append(float(values[0]))
            rows.append(values[:, None] * right)
            owner += [len(first) - 1] * len(values)
        return cls(
            torch.cat(rows), torch.tensor(owner), torch.tensor(list(deltas)), torch.tensor(first), torch.tensor(sigma)
        )

    def act(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return ‖ΔW x‖ and |v·x| per token and expert."""
        products = x.float() @ self.rows_RI.T
        squares = products.new_zeros(*x.shape[:-1], len(self.experts)).index_add_(-1, self.owner_R, products.square())
        return squares.sqrt(), products[..., self.first].abs() / self.sigma.clamp_min(1e-9)


def adapted_layers(expert: Any) -> dict[str, LoraDelta]:
    """Return the LoRA deltas of an expert by layer."""
    deltas = {path: read_lora(layer) for path, layer in linear_layers(expert).items()}
    return {path: delta for path, delta in deltas.items() if delta is not None}


class PeerTap:
    """Collects how the experts' ΔW act, layer by layer, in a forward pass of the base."""

    def __init__(self, base: Any, experts: Sequence[Any]):
        found: dict[str, dict[int, Any]] = {}
        for number, expert in enumerate(experts):
            for path, delta in adapted_layers(expert).items():
                found.setdefault(path, {})[number] = delta
        self.layers = sorted(found)
        self.count = len(experts)
        self._factors = {path: Factors.of(found[path]) for path in self.layers}
        self._acts: dict[str, tuple[Tensor, Tensor]] = {}
        self._base = base

    @contextmanager
    def on(self) -> Iterator[None]:
        handles = [self._base.get_submodule(path).register_forward_pre_hook(self._hook(path)) for path in self.layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, path: str) -> Any:
        def read(module: Any, arguments: tuple[Tensor, ...]) -> None:
            self._acts[path] = self._factors[path].act(arguments[0])

        return read

    def take(self, row: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return last_MK, mean_MK and first_MK of one prompt of the batch."""
        found = torch.full((3, len(self.layers), self.count), torch.nan)
        for place, path in enumerate(self.layers):
            norms, along = (each[row, :length] for each in self._acts[path])
            for number, values in enumerate((norms[-1], norms.mean(0), along.mean(0))):
                found[number, place, self._factors[path].experts] = values
        return found[0], found[1], found[2]


class Readings:
    """Readings of prompts by token ids; measures those that are not on disk."""

    def __init__(self, base: Any, router: DeltaRouter, experts: Sequence[Any], folder: Path, log: Log = print):
        self.base, self.router, self.log = base, router, log
        self._experts, self._tap = list(experts), None
        self.folder = folder / "readings" / _fingerprint(router)
        self.folder.mkdir(parents=True, exist_ok=True)

    def of(self, rows: Sequence[Sequence[int]]) -> list[Reading]:
        """Return what the base says of each prompt."""
        missing = {self._path(row): row for row in rows if not self._path(row).is_file()}
        if missing:
            self._measure(list(missing.values()))
        return [self._read(row) for row in rows]

    def _path(self, row: Sequence[int]) -> Path:
        return self.folder / f"{hashlib.sha256(json.dumps(list(row)).encode()).hexdigest()[:24]}.npz"

    @torch.inference_mode()
    def _measure(self, rows: Sequence[Sequence[int]]) -> None:
        peers = PeerTap(self.base, self._experts)
        done = 0
        with self.router.tap(self.base) as tap, peers.on():
            for batch in _batches(rows):
                longest = max(map(len, batch))  # padding comes last: no token before sees it
                ids_BT = torch.tensor([[*row, *[0] * (longest - len(row))] for row in batch])
                self.base.base_model(input_ids=ids_BT, use_cache=False)
                energies = tap.take()
                for place, row in enumerate(batch):
                    start = self.router.marks.read(row).user.start
                    kept = energies[place, start : len(row)]
                    self._write(row, kept, *peers.take(place, len(row)))
                done += len(batch)
                self.log(f"{done} of {len(rows)} prompts read")

    def _write(self, row: Sequence[int], energy_TK: Tensor, *peers: Tensor) -> None:
        with new_file(self._path(row)) as path, path.open("wb") as file:
            np.savez(file, energy=energy_TK.half().numpy(), peers=torch.stack(peers).numpy())

    def _read(self, row: Sequence[int]) -> Reading:
        with np.load(self._path(row)) as kept:
            peers = torch.from_numpy(kept["peers"])
            energies = torch.from_numpy(kept["energy"]).float()
        return Reading(row, self.router.marks.read(row).user, energies, *peers)


def _fingerprint(router: DeltaRouter) -> str:
    """Name what energies depend on: the experts' directions, the blocks, and the library's code for energies."""
    found = hashlib.sha256(inspect.getsource(energy).encode())
    found.update(json.dumps([router.settings["blocks"], router.settings["groups"], list(router.experts)]).encode())
    for name in router.experts:
        for path, rows in sorted(router.profiles[name].directions.items()):
            found.update(path.encode() + rows.numpy().tobytes())
    return found.hexdigest()[:16]


def _batches(rows: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    batch: list[Sequence[int]] = []
    for row in sorted(rows, key=len):
        if batch and (len(batch) + 1) * len(row) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch
