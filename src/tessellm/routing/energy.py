"""Delta energy: how strongly each expert would respond to the inputs of the base's own layers.

    e_i(t) = mean over the expert's layers of ‖V x_t‖² / ‖x_t‖²        V: the directions of the expert at that layer

So an energy is the share of the layers' inputs that lies in the directions which the expert's ΔW reads. No expert runs.
Layers with one input (q, k and v; gate and up) share one product over the directions of all experts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from .directions import block_of

MANY = 48  # experts from which on every second block counts


def plan_blocks(blocks: int, experts: int) -> list[int]:
    """Return the blocks whose energies count: from a quarter of the depth on; every second with many experts."""
    return list(range(blocks // 4, blocks, 1 if experts < MANY else 2))


@dataclass(frozen=True)
class StackedDirections:
    """The directions of all experts at layers that share an input."""

    rows_RI: Tensor
    share_RK: Tensor  # 1 / layers of the expert that a row belongs to, 0 for the others

    def to(self, x: Tensor) -> StackedDirections:
        return StackedDirections(self.rows_RI.to(x), self.share_RK.to(x.device))

    def energies(self, x: Tensor) -> Tensor:
        """Return these layers' part of each expert's energy, [..., K] in float32."""
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        unit = (x / norm.clamp_min(1e-6)).to(x.dtype)
        return (unit @ self.rows_RI.T).float().square() @ self.share_RK


def stack_directions(
    groups: Sequence[Sequence[str]], experts: Sequence[Mapping[str, Tensor]], blocks: Sequence[int]
) -> dict[str, StackedDirections]:
    """Return, by the path of each group's first layer, what is multiplied with the group's input."""
    chosen = [[path for path in expert if block_of(path) in blocks] for expert in experts]
    stacked = {}
    for group in groups:
        rows: list[Tensor] = []
        shares: list[Tensor] = []
        for number, expert in enumerate(experts):
            for path in (path for path in group if path in chosen[number]):
                share_RK = torch.zeros(len(expert[path]), len(experts))
                share_RK[:, number] = 1 / len(chosen[number])
                rows.append(expert[path].float())
                shares.append(share_RK)
        if rows:
            stacked[group[0]] = StackedDirections(torch.cat(rows), torch.cat(shares))
    return stacked


class Energies:
    """Collects energies while the base runs; an `EnergyTap`."""

    def __init__(self, stacked: Mapping[str, StackedDirections], experts: int):
        self.experts = experts
        self._stacked = dict(stacked)
        self._passes: Counter[str] = Counter()
        self._forwards: list[Tensor] = []

    def hook(self, path: str) -> Any:
        """Return the forward pre-hook of one layer. Other threads may run it meanwhile, which is not collected."""
        thread = get_ident()

        def read_input(module: nn.Module, arguments: tuple, keywords: dict) -> None:
            if get_ident() == thread:
                self._add(path, arguments[0] if arguments else next(iter(keywords.values())))

        return read_input

    def take(self) -> Tensor:
        """Return energy_BTK of the forward passes since the last take, one after the other along T, on the CPU."""
        found = [energy_BTK.cpu() for energy_BTK in self._forwards]
        self._forwards, self._passes = [], Counter()
        return torch.cat(found, 1) if found else torch.zeros(1, 0, self.experts)

    def _add(self, path: str, x: Tensor) -> None:
        x = x[None] if x.dim() == 2 else x
        stacked = self._stacked[path]
        if stacked.rows_RI.dtype != x.dtype or stacked.rows_RI.device != x.device:
            stacked = self._stacked[path] = stacked.to(x)
        number, energy_BTK = self._passes[path], stacked.energies(x)
        self._passes[path] += 1
        if number == len(self._forwards):
            self._forwards.append(energy_BTK)
        else:
            self._forwards[number] = self._forwards[number] + energy_BTK


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

    thread = get_ident()

    def note(path: str) -> Any:
        def hook(module: nn.Module, arguments: tuple) -> None:
            if get_ident() == thread:
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
