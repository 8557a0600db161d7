"""Delta energy: how strongly each expert would respond to the inputs of the base's own layers.

    e_i(t) = mean over the expert's layers of a block of ‖R x_t‖ / ‖x_t‖        R: the expert's directions at that layer

No expert runs. Layers with one input (q, k and v; gate and up) share one product over the directions of all experts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .directions import block_of

CHUNK = 4  # rows that are summed first
MANY = 48  # experts from which on every second block counts


def plan_blocks(blocks: int, experts: int) -> list[int]:
    """Return the blocks whose energies count: from a quarter of the depth on; every second with many experts."""
    return list(range(blocks // 4, blocks, 1 if experts < MANY else 2))


@dataclass(frozen=True)
class StackedDirections:
    """The directions of all experts at layers that share an input, in chunks of CHUNK rows."""

    rows_RI: Tensor
    layer_C: Tensor  # chunk → (expert, layer)
    expert_S: Tensor  # (expert, layer) → expert
    share_S: Tensor  # 1 / layers of that expert in the block

    def to(self, x: Tensor) -> StackedDirections:
        rest = (each.to(x.device) for each in (self.layer_C, self.expert_S, self.share_S))
        return StackedDirections(self.rows_RI.to(x), *rest)

    def energies(self, x: Tensor, experts: int) -> Tensor:
        """Return each expert's part of the block's mean energy, [..., K] in float32."""
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        unit = (x / norm.clamp_min(1e-6)).to(x.dtype)
        chunks = (unit @ self.rows_RI.T).float().square().unflatten(-1, (-1, CHUNK)).sum(-1)
        squares = chunks.new_zeros(*x.shape[:-1], len(self.expert_S)).index_add_(-1, self.layer_C, chunks)
        parts = squares.sqrt() * self.share_S
        return parts.new_zeros(*x.shape[:-1], experts).index_add_(-1, self.expert_S, parts)


def stack_directions(
    groups: Sequence[Sequence[str]], experts: Sequence[Mapping[str, Tensor]], blocks: Sequence[int]
) -> dict[str, StackedDirections]:
    """Return, by the path of each group's first layer, what is multiplied with the group's input."""
    layers = [Counter(map(block_of, expert)) for expert in experts]
    stacked = {}
    for group in groups:
        if block_of(group[0]) not in blocks:
            continue
        rows: list[Tensor] = []
        layer: list[int] = []
        owner: list[int] = []
        share: list[float] = []
        for number, expert in enumerate(experts):
            for path in (path for path in group if path in expert):
                given = expert[path]
                chunks = -(-len(given) // CHUNK)
                rows.append(torch.nn.functional.pad(given.float(), (0, 0, 0, chunks * CHUNK - len(given))))
                layer += [len(owner)] * chunks
                owner.append(number)
                share.append(1 / layers[number][block_of(path)])
        if rows:
            stacked[group[0]] = StackedDirections(
                torch.cat(rows), torch.tensor(layer), torch.tensor(owner), torch.tensor(share)
            )
    return stacked


class Energies:
    """Collects energies while the base runs; an `EnergyTap`."""

    def __init__(self, stacked: Mapping[str, StackedDirections], blocks: Sequence[int], experts: int):
        self.experts = experts
        self._blocks = {block: place for place, block in enumerate(blocks)}
        self._stacked = dict(stacked)
        self._passes: dict[str, int] = defaultdict(int)
        self._forwards: list[list[Tensor | None]] = []

    def hook(self, path: str) -> Any:
        """Return the forward pre-hook of one layer."""
        place = self._blocks[block_of(path) or 0]

        def read_input(module: nn.Module, arguments: tuple, keywords: dict) -> None:
            self._add(path, place, arguments[0] if arguments else next(iter(keywords.values())))

        return read_input

    def take(self) -> Tensor:
        """Return energy_BTLK of the forward passes since the last take, one after the other along T, on the CPU."""
        found = []
        for forward in self._forwards:
            shape = next(energy.shape for energy in forward if energy is not None)
            device = next(energy.device for energy in forward if energy is not None)
            filled = [torch.zeros(shape, device=device) if energy is None else energy for energy in forward]
            found.append(torch.stack(filled, -2).cpu())
        self._forwards, self._passes = [], defaultdict(int)
        return torch.cat(found, 1) if found else torch.zeros(1, 0, len(self._blocks), self.experts)

    def _add(self, path: str, place: int, x: Tensor) -> None:
        x = x[None] if x.dim() == 2 else x
        stacked = self._stacked[path]
        if stacked.rows_RI.dtype != x.dtype or stacked.rows_RI.device != x.device:
            stacked = self._stacked[path] = stacked.to(x)
        number = self._passes[path]
        self._passes[path] += 1
        if number == len(self._forwards):
            self._forwards.append([None] * len(self._blocks))
        before, energy = self._forwards[number][place], stacked.energies(x, self.experts)
        self._forwards[number][place] = energy if before is None else before + energy


@contextmanager
def tapped(base: nn.Module, energies: Energies, paths: Sequence[str]) -> Iterator[Energies]:
    """Collect energies from the inputs of these layers in every forward pass of `base` inside the context."""
    handles = []
    try:
        for path in paths:
            module = base.get_submodule(path)
            handles.append(module.register_forward_pre_hook(energies.hook(path), with_kwargs=True))
        yield energies
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def shared_inputs(base: Any, paths: Sequence[str]) -> list[list[str]]:
    """Return these layers in groups of one input each, found by running the base on one token."""
    inputs: list[Tensor] = []  # held, so that no two share an address
    groups: dict[int, list[str]] = defaultdict(list)

    def note(path: str) -> Any:
        def hook(module: nn.Module, arguments: tuple) -> None:
            inputs.append(arguments[0])
            groups[id(arguments[0])].append(path)

        return hook

    handles = [base.get_submodule(path).register_forward_pre_hook(note(path)) for path in paths]
    try:
        device = base.get_input_embeddings().weight.device
        base(input_ids=torch.zeros(1, 1, dtype=torch.long, device=device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    seen = {path for group in groups.values() for path in group}
    return [*groups.values(), *([path] for path in paths if path not in seen)]
