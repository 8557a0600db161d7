"""LoRA adapters of one model trained side by side: a batch is groups of rows, and each group has matrices of its own.

All matrices can be read, moved and set as one tensor [G, P], so that an optimiser is a few operations on that. Knows
modules and tensors; nothing of data or files.

Shapes: G group, R rank, T time, P all parameters of one group, D width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from .packing import ID, IGNORED, LABEL, POSITION, SEGMENT

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PREFIX = "base_model.model."  # of names in PEFT's files


class GroupedLinear(nn.Module):
    """A linear layer, and a low-rank delta per group of rows."""

    def __init__(self, base: nn.Linear, down_GDR: Tensor, scale: float):
        super().__init__()
        self.base, self.scale = base, scale
        groups, _, rank = down_GDR.shape
        self.down = nn.Parameter(down_GDR)
        self.up = nn.Parameter(torch.zeros(groups, rank, base.out_features, device=down_GDR.device))

    def forward(self, x: Tensor) -> Tensor:
        low = torch.bmm(x.reshape(len(self.down), -1, x.shape[-1]), self.down.to(x.dtype))
        return self.base(x) + torch.bmm(low, self.up.to(x.dtype)).view(*x.shape[:-1], -1) * self.scale


class LoraGroups:
    """The adapters of all groups, put into a model: the model's own parameters are frozen."""

    def __init__(self, model: nn.Module, seeds: Sequence[int], rank: int = 8, alpha: float = 16):
        self.model, self.groups, self.rank, self.alpha = model, len(seeds), rank, alpha
        model.requires_grad_(False)
        linear = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
        self.layers: dict[str, GroupedLinear] = {}
        for name, layer in linear.items():
            if name.rpartition(".")[2] in TARGETS:
                own = [seed * 1_000_003 + len(self.layers) for seed in seeds]
                self.layers[name] = GroupedLinear(layer, _drawn(layer, own, rank), alpha / rank)
                model.set_submodule(name, self.layers[name])
        self.matrices = [matrix for layer in self.layers.values() for matrix in (layer.down, layer.up)]

    @property
    def values_GP(self) -> Tensor:
        """A copy of all matrices."""
        return torch.cat([matrix.detach().flatten(1) for matrix in self.matrices], 1)

    def take_gradient(self) -> Tensor:
        """The gradient [G, P], which is forgotten here."""
        found_GP = torch.cat([_gradient(matrix).flatten(1) for matrix in self.matrices], 1)
        for matrix in self.matrices:
            matrix.grad = None
        return found_GP

    @torch.no_grad()
    def move(self, by_GP: Tensor) -> None:
        """Add to all matrices."""
        parts = by_GP.to(self.matrices[0].device).split([matrix[0].numel() for matrix in self.matrices], 1)
        moves = [part.view_as(matrix) for part, matrix in zip(parts, self.matrices, strict=True)]
        torch._foreach_add_(list(self.matrices), moves)

    def set(self, values_GP: Tensor) -> None:
        """Set all matrices."""
        for matrix in self.matrices:
            matrix.detach().zero_()
        self.move(values_GP)

    def tensors(self, group: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
        """One group's matrices by PEFT's names and in its layout, copied to the CPU."""
        found = {}
        for name, layer in self.layers.items():
            for part, matrix in (("A", layer.down[group]), ("B", layer.up[group])):
                found[f"{PREFIX}{name}.lora_{part}.weight"] = matrix.detach().t().to("cpu", dtype).contiguous()
        return found

    def losses(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Nats of all answer tokens per group, and how many those are. `rows` are [·, 4, T], group by group."""
        ids, labels, segments, positions = (rows[:, part].long() for part in (ID, LABEL, SEGMENT, POSITION))
        causal_TT = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril()
        mask = (segments[:, :, None] == segments[:, None, :]) & causal_TT
        model: Any = self.model
        hidden = model.model(
            input_ids=ids, attention_mask=mask[:, None], position_ids=positions, use_cache=False
        ).last_hidden_state
        head = model.lm_head.weight
        hidden_G, labels_G = hidden.view(self.groups, -1, hidden.shape[-1]), labels.view(self.groups, -1)
        nats_G = [_nats(hidden_G[group], labels_G[group], head) for group in range(self.groups)]
        return torch.stack(nats_G), (labels_G != IGNORED).sum(1)


def _drawn(layer: nn.Linear, seeds: Sequence[int], rank: int) -> Tensor:
    """A of every group, [G, D, R], as PEFT draws it: uniform within 1/√D."""
    bound, shape = 1 / math.sqrt(layer.in_features), (layer.in_features, rank)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    drawn = [torch.empty(shape).uniform_(-bound, bound, generator=each) for each in generators]
    return torch.stack(drawn).to(layer.weight.device)


def _gradient(matrix: Tensor) -> Tensor:
    assert matrix.grad is not None
    return matrix.grad


def _nats(hidden_TD: Tensor, labels_T: Tensor, head_VD: Tensor) -> Tensor:
    """One group's: logits are large, so they are computed again for the gradient rather than kept."""

    def compute(hidden: Tensor, labels: Tensor) -> Tensor:
        logits = functional.linear(hidden, head_VD).float()
        return functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")

    return checkpoint(compute, hidden_TD, labels_T, use_reentrant=False)
