"""LowRank: a module with a low-rank delta on it, and the deltas of many members on one module.

PEFT's LoRA layers are read as this. Weights of deltas are the members' own tensors, kept once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...members.lora_layers import read_lora
from .segments import Segment, Segments, others_columns

MOST_JOINED = 8  # members of a forward whose deltas are one product; copies of so many are kept


class LowRank(nn.Module):
    """A linear layer of the base plus s B A x: A is [rank, in], B [out, rank]."""

    def __init__(self, base_layer: nn.Module, down_RI: Tensor, raw_OR: Tensor, scale: float = 1.0):
        super().__init__()
        self.base_layer, self.scale = base_layer, scale
        self.down_RI, self.raw_OR = nn.Parameter(down_RI, False), nn.Parameter(raw_OR, False)

    @property
    def up_OR(self) -> Tensor:
        """Return s B."""
        return self.raw_OR if self.scale == 1 else self.raw_OR * self.scale

    def forward(self, x: Tensor) -> Tensor:
        """Add the delta in the slow, obvious form, with which the batched one is compared."""
        y: Tensor = self.base_layer(x) + (x @ self.down_RI.T) @ self.up_OR.T
        return y


def read_low_rank(module: nn.Module) -> LowRank | None:
    """Read a module as a low-rank delta on a linear layer; None if it is something else (DoRA, a merged adapter, …)."""
    if isinstance(module, LowRank):
        return module
    delta = read_lora(module)
    return LowRank(*delta[:4]) if delta is not None and delta.is_plain else None


class Factors(NamedTuple):
    """A delta's own tensors: s B A x."""

    down_RI: Tensor
    raw_OR: Tensor
    scale: float

    @property
    def is_finite(self) -> bool:
        return bool(self.down_RI.isfinite().all() and self.raw_OR.isfinite().all())


class JoinedDeltas(NamedTuple):
    """The deltas of several members side by side: A as [L, in], s B as [L, out], where L are the members' ranks one
    behind another."""

    down_LI: Tensor
    up_LO: Tensor
    ranks: tuple[int, ...]  # of each member

    def add(self, x_NI: Tensor, y_NO: Tensor, segments: Sequence[Segment]) -> None:
        """Add what the members of these segments, one behind another, add to their own tokens."""
        rows = slice(segments[0].begin, segments[-1].end)
        low_NL = x_NI[rows].to(self.down_LI.dtype) @ self.down_LI.T
        low_NL.masked_fill_(others_columns(tuple(segments), self.ranks), 0)
        if y_NO.dtype == low_NL.dtype:
            y_NO[rows].addmm_(low_NL, self.up_LO)
        else:
            y_NO[rows] += (low_NL @ self.up_LO).to(y_NO.dtype)


class SharedWithDeltas(nn.Module):
    """One layer for the rows of M members, and each member's own delta on its rows."""

    def __init__(self, base_layer: nn.Module, deltas: list[LowRank | None], segments: Segments):
        super().__init__()
        self.base_layer, self.members, self.segments = base_layer, len(deltas), segments
        self.deltas = [None if d is None else Factors(d.down_RI.detach(), d.raw_OR.detach(), d.scale) for d in deltas]
        given = [delta.down_RI for delta in self.deltas if delta is not None]
        self.dtype = reduce(torch.promote_types, [down_RI.dtype for down_RI in given])  # adapters' own may differ
        self.finite = all(delta.is_finite for delta in self.deltas if delta is not None)  # else one's NaN is another's
        self.joined: tuple[tuple[int, ...], JoinedDeltas] | None = None  # of the members that ran last, if several
        self.stacks = self._stacked() if given[0].is_cuda else None  # there, before anything is captured

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base_layer(x)
        if self.segments.current is None:
            return y + self._of_all(x).to(y.dtype)
        own = [segment for segment in self.segments.current if self.deltas[segment.member] is not None]
        if self.finite and 1 < len(own) <= MOST_JOINED:
            self._join(tuple(segment.member for segment in own)).add(x[0], y[0], own)
        else:
            for segment in own:
                down_RI, raw_OR, scale = self.deltas[segment.member]  # type: ignore[misc]
                low_NR = x[0, segment.begin : segment.end].to(self.dtype) @ down_RI.to(self.dtype).T
                delta_NO = (low_NR * scale) @ raw_OR.to(self.dtype).T
                y[0, segment.begin : segment.end] += delta_NO.to(y.dtype)
        return y

    def _join(self, members: tuple[int, ...]) -> JoinedDeltas:
        if self.joined is None or self.joined[0] != members:
            given = [delta for member in members if (delta := self.deltas[member]) is not None]
            down_LI = torch.cat([delta.down_RI.to(self.dtype) for delta in given])
            up_LO = torch.cat([delta.raw_OR.to(self.dtype).T * delta.scale for delta in given])
            self.joined = members, JoinedDeltas(down_LI, up_LO, tuple(len(delta.down_RI) for delta in given))
        return self.joined[1]

    def _stacked(self) -> tuple[Tensor, Tensor]:
        """Return all deltas as two tensors, padded to the largest rank: A as [M, I, R], s B as [M, R, O]. For forwards
        over all members of a slot."""
        given = [delta for delta in self.deltas if delta is not None]
        one, rank = given[0], max(len(delta.down_RI) for delta in given)
        down_MRI = one.down_RI.new_zeros(self.members, rank, one.down_RI.shape[1], dtype=self.dtype)
        up_MRO = one.raw_OR.new_zeros(self.members, rank, one.raw_OR.shape[0], dtype=self.dtype)
        for m, delta in enumerate(self.deltas):
            if delta is not None:
                own = len(delta.down_RI)
                down_MRI[m, :own], up_MRO[m, :own] = delta.down_RI, (delta.raw_OR * delta.scale).T
        return down_MRI.transpose(1, 2).contiguous(), up_MRO

    def _of_all(self, x: Tensor) -> Tensor:
        """Compute the deltas of slot-major rows, [S · M, T, in], as batched products."""
        self.stacks = self.stacks or self._stacked()
        down_MIR, up_MRO = self.stacks
        by_member = x.unflatten(0, (-1, self.members)).transpose(0, 1)  # [M, S, T, in]
        low = torch.bmm(by_member.flatten(1, 2).to(self.dtype), down_MIR)
        return torch.bmm(low, up_MRO).unflatten(1, by_member.shape[1:3]).transpose(0, 1).flatten(0, 1)
