"""StackedNorm: the norms of M members on the rows of all of them, as many launches as one norm has."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn


class StackedNorm(nn.Module):
    """Rows are slot-major, [S · M, T, …, size]. The first member's norm runs, around the gains of all members: it only
    multiplies by them, so it takes them with one more dimension as well."""

    def __init__(self, norms: Sequence[nn.Module]):
        super().__init__()
        self.members = len(norms)
        self.like = [norms[0]]  # in a list: not a submodule
        gains: list[Tensor] = [norm.get_parameter("weight") for norm in norms]
        self.register_buffer("gain_MN", torch.stack(gains).detach(), persistent=False)
        self._by_dimensions: dict[int, nn.Module] = {}

    @staticmethod
    def fits(norms: Sequence[nn.Module]) -> bool:
        """Whether these are Hugging Face's RMS norms, with a gain and nothing else."""
        plain = all(
            [name for name, _ in norm.named_parameters()] == ["weight"] and not list(norm.buffers()) for norm in norms
        )
        name = type(norms[0]).__name__
        return plain and name.endswith("RMSNorm") and not isinstance(norms[0], nn.RMSNorm)

    @property
    def weight(self) -> Tensor:
        return self.like[0].get_parameter("weight")

    def forward(self, x: Tensor) -> Tensor:
        rows = x.unflatten(0, (-1, self.members))
        normed: Tensor = self._norm(rows.ndim)(rows)
        return normed.flatten(0, 1)

    def _norm(self, dimensions: int) -> nn.Module:
        """Make the norm with gains for rows of so many dimensions: [M, 1, …, size]."""
        if dimensions not in self._by_dimensions:
            norm = copy.copy(self.like[0])
            gain_MN: Tensor = self.gain_MN  # type: ignore[assignment]
            gain = gain_MN.view(self.members, *[1] * (dimensions - 3), -1)
            norm._parameters = {"weight": nn.Parameter(gain, requires_grad=False)}
            self._by_dimensions[dimensions] = norm
        return self._by_dimensions[dimensions]
