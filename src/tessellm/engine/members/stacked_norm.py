"""StackedNorm: the norms of M members on the rows of all of them, as many launches as one norm has."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .segments import Segments


class StackedNorm(nn.Module):
    """On slot-major rows, [S · M, T, …, size], the first member's norm runs, around the gains of all members: it only
    multiplies by them, so it takes them with one more dimension as well."""

    def __init__(self, norms: Sequence[nn.Module], segments: Segments):
        super().__init__()
        self.members, self.segments = len(norms), segments
        self.like = list(norms)  # in a list: not submodules
        gains: list[Tensor] = [norm.get_parameter("weight") for norm in norms]
        self.register_buffer("gain_MN", torch.stack(gains).detach(), persistent=False)
        self._tokens_at = 1
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
        if self.segments.current is not None:
            return self.segments.apply(x, self.like, self._token_dimension(x, self.segments.current[-1].end))
        rows = x.unflatten(0, (-1, self.members))
        normed: Tensor = self._norm(rows.ndim)(rows)
        return normed.flatten(0, 1)

    def _token_dimension(self, x: Tensor, tokens: int) -> int:
        """Return where tokens are: heads may come before or behind them, always in the same order."""
        found = [at for at in range(1, x.ndim - 1) if x.shape[at] == tokens]
        if len(found) == 1:
            self._tokens_at = found[0]
        return self._tokens_at

    def _norm(self, dimensions: int) -> nn.Module:
        """Make the norm with gains for rows of so many dimensions: [M, 1, …, size]."""
        if dimensions not in self._by_dimensions:
            norm = copy.copy(self.like[0])
            gain_MN: Tensor = self.gain_MN  # type: ignore[assignment]
            gain = gain_MN.view(self.members, *[1] * (dimensions - 3), -1)
            norm._parameters = {"weight": nn.Parameter(gain, requires_grad=False)}
            self._by_dimensions[dimensions] = norm
        return self._by_dimensions[dimensions]
