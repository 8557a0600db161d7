"""Low-rank deltas of layers that read the same input, over all members, as kernels find them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ...members.low_rank import LowRank
from .addresses import BLOCK_N, block_addresses

MOST_COLUMNS = 64  # columns of all members' factors in one product


class Low(NamedTuple):
    """The low-rank input: down · x of every row by its own member, in parts whose sum it is."""

    numbers_SMBL: Tensor
    deltas: Deltas


class Deltas:
    """Both factors of every delta, all members' side by side and padded to one rank; zeros where a member has none."""

    def __init__(
        self,
        deltas: Sequence[Sequence[LowRank | None]],
        sizes: Sequence[int],
        k: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        """`deltas[m]` holds member m's, one per layer; `sizes` the layers' outputs."""
        given = [delta for own in deltas for delta in own if delta is not None]
        if not all(factor.isfinite().all() for delta in given for factor in (delta.down_RI, delta.up_OR)):
            raise ValueError("a delta is not finite: all members' are in one product, and zero times NaN is NaN")
        self.rank = rank = max(16, triton.next_power_of_2(max(len(delta.down_RI) for delta in given)))
        self.members, self.width, self.device = len(deltas), len(sizes) * rank, device
        self.chunk = min(triton.next_power_of_2(self.members * rank), max(MOST_COLUMNS, rank))
        self.down_MLK = torch.zeros(self.members, self.width, k, dtype=dtype, device=device)
        self.up_OC = torch.zeros(sum(sizes), self.members * rank, dtype=dtype, device=device)
        for (member, own), (part, size) in itertools.product(enumerate(deltas), enumerate(sizes)):
            delta = own[part]
            if delta is not None:
                self.down_MLK[member, part * rank :][: len(delta.down_RI)] = delta.down_RI
                here = self.up_OC[sum(sizes[:part]) :][:size, member * rank :]
                here[:, : delta.up_OR.shape[1]] = delta.up_OR
        self.down_table = block_addresses([[down] for down in self.down_MLK], device)
        numbers = [part for part, size in enumerate(sizes) for _ in range(size // BLOCK_N)]
        self.parts = torch.tensor(numbers, dtype=torch.int32, device=device)  # of every block of outputs

    def room(self, parts: int, members: int, slots: int) -> Low:
        """Make room for the low-rank input of that many rows."""
        return Low(torch.empty(parts, members, slots, self.width, device=self.device), self)
