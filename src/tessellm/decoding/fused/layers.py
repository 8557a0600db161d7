"""FusedLinear: one launch for all linear layers that read the same input, of all members, low-rank deltas included."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from ..low_rank import LowRank, read_low_rank
from .kernels import linear_kernel, thin_kernel

TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
BLOCK_N = 16  # output rows an address stands for
THIN = 1  # rows up to which sums in registers beat matrix units; never those of members with deltas
MOST_BLOCK_R = 64  # rows of one program
PROGRAMS = 264  # two for each multiprocessor of an H200; a launch with fewer is split along its sums
SHORTEST_SUM = 512  # but not into pieces shorter than this


def addresses(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Where tensors start: at multiples of 16 bytes, which the kernels rely on."""
    if device.type == "cuda" and any(tensor.data_ptr() % 16 for tensor in tensors):
        raise ValueError("a weight does not start at a multiple of 16 bytes")
    return torch.tensor([tensor.data_ptr() for tensor in tensors], device=device)


def block_addresses(rows: Sequence[Sequence[Tensor | None]], device: torch.device) -> Tensor:
    """For each group: the address of every block of BLOCK_N rows of its tensors, one after another; 0 for none."""
    table = []
    for tensors in rows:
        for tensor in tensors:
            if tensor is None:
                continue
            addresses([tensor], device)
            step = tensor.stride(0) * tensor.element_size() * BLOCK_N
            table += [tensor.data_ptr() + block * step for block in range(tensor.shape[0] // BLOCK_N)]
    return torch.tensor(table, device=device)


class FusedLinear:
    """y = W x for parts that read the same x: [M, B, in] to [splits, M, B, sum of parts' out]. Readers add splits up.

    `members[m]` holds member m's modules, one a part; with `glu` the two parts are gate and up, and y = act(gate) · up.
    Members that share all weights are one group whose rows are all members'; else each member is a group.
    """

    def __init__(
        self,
        members: Sequence[Sequence[nn.Module]],
        glu: int = 0,
        cap: float | None = None,
        out_dtype: torch.dtype | None = None,
        splits: bool = False,
    ):
        deltas = [[read_low_rank(module) for module in modules] for modules in members]
        layers: list[list[Any]] = [
            [module if delta is None else delta.base_layer for module, delta in zip(modules, own, strict=True)]
            for modules, own in zip(members, deltas, strict=True)
        ]
        one = layers[0][0].weight
        self.device, self.dtype, self.k = one.device, one.dtype, one.shape[1]
        self.shared = all(
            layer.weight.data_ptr() == first.weight.data_ptr()
            for own in layers
            for layer, first in zip(own, layers[0], strict=True)
        )
        self.members, self.glu, self.cap, self.may_split = len(members), glu, cap, splits
        groups = layers[:1] if self.shared else layers
        parts = [[layer.weight for layer in own] for own in groups]
        gates = [own[:1] for own in parts] if glu else parts
        self.table = block_addresses(gates, self.device)
        self.up_table = block_addresses([own[1:] for own in parts], self.device) if glu else self.table
        self.sizes = [weight.shape[0] for weight in gates[0]]
        self.out = sum(self.sizes)
        self.unit = math.gcd(*self.sizes)  # a launch's blocks stay inside a part
        biases = [[layer.bias for layer in own] for own in groups]
        self.biased = biases[0][0] is not None
        self.bias_table = block_addresses(biases, self.device) if self.biased else self.table
        self.out_dtype = out_dtype or self.dtype
        self._kept = (parts, biases)
        self.low: _Low | None = _Low(deltas, self) if any(any(own) for own in deltas) else None
        if self.low is not None and not self.shared:
            raise ValueError("deltas are added to a shared weight")

    def __call__(self, x_MBK: Tensor) -> Tensor:
        members, slots, k = x_MBK.shape
        groups, rows = (1, members * slots) if self.shared else (members, slots)
        layout = layout_of(groups, rows, self.unit, self.out, k, self.may_split, self.dtype)
        dtype = torch.float32 if layout.splits > 1 else self.out_dtype
        y = torch.empty(layout.splits, members, slots, self.out, dtype=dtype, device=x_MBK.device)
        low = self.low(x_MBK) if self.low is not None else None
        launch(
            layout, self.table, x_MBK, y, groups, rows, self.out, k, self.dtype, up_table=self.up_table,
            biases=self.bias_table, glu=self.glu, biased=self.biased, cap=self.cap, low=low, delta=self.low,
            rows_a_member=slots,
        )  # fmt: skip
        return y


@dataclass(frozen=True)
class Layout:
    """How a launch is laid out."""

    thin: bool
    splits: int
    settings: dict[str, Any]


def layout_of(
    groups: int, rows: int, unit: int, out: int, k: int, may_split: bool, dtype: torch.dtype = torch.bfloat16
) -> Layout:
    """The layout that was fastest on one H200 (benchmarks/fused_linear.py)."""
    padded = triton.next_power_of_2(rows)
    if rows <= THIN:
        size = {"BLOCK_N": 2, "BLOCK_K": 1024} if k > 4096 else {"BLOCK_N": 8, "BLOCK_K": 256}
        return Layout(True, 1, {"BLOCK_R": padded, "num_warps": 4, **size})
    block_n = next(size for size in (64, 32, 16) if unit % size == 0)
    programs = groups * out // block_n
    splits = min(-(-PROGRAMS // programs), max(1, k // SHORTEST_SUM)) if may_split else 1
    most, stages = (MOST_BLOCK_R, 5) if dtype.itemsize == 2 else (16, 3)  # as many as fit
    block_r = min(max(16, padded), most)
    settings = {"BLOCK_R": block_r, "BLOCK_N": block_n, "BLOCK_K": 64, "num_warps": 4, "num_stages": stages}
    return Layout(False, splits, {**settings, "PRECISION": "ieee"})


def launch(
    layout: Layout, table: Tensor, x: Tensor, y: Tensor, groups: int, rows: int, out: int, k: int, dtype: torch.dtype,
    up_table: Tensor | None = None, biases: Tensor | None = None, glu: int = 0, biased: bool = False,
    cap: float | None = None, low: Tensor | None = None, delta: _Low | None = None, rows_a_member: int = 1,
) -> None:  # fmt: skip
    """One launch of a linear kernel."""
    row_blocks = -(-rows // layout.settings["BLOCK_R"])
    grid = (out // layout.settings["BLOCK_N"] * row_blocks, groups, layout.splits)
    tables = (table, table if up_table is None else up_table, table if biases is None else biases)
    common: dict[str, Any] = {"K": k, "TABLE_N": BLOCK_N, "GLU": glu, "BIAS": biased, "CAP": cap is not None}
    common |= {"SPLITS": layout.splits, "WEIGHT": TYPES[dtype], **layout.settings}
    if layout.thin:
        thin_kernel[grid](x, y, *tables, rows, out // BLOCK_N, out, cap or 1.0, **common)
        return
    if delta is None or low is None:
        deltas, width, sizes = (x, table, table), 0, {"MEMBERS": 0, "RANK": 16, "LOW_SPLITS": 1}
    else:
        deltas, width = (low, delta.table, delta.parts), delta.width
        sizes = {"MEMBERS": delta.members, "RANK": delta.rank, "LOW_SPLITS": low.shape[0]}
    linear_kernel[grid](
        x, y, *tables, *deltas, rows, out // BLOCK_N, out, cap or 1.0, width, rows, rows_a_member,
        ROW_BLOCKS=row_blocks, **sizes, **common,
    )  # fmt: skip


class _Low:
    """The first halves of all deltas: low = A x of every row by its own member. The owner adds the rest."""

    def __init__(self, deltas: Sequence[Sequence[LowRank | None]], owner: FusedLinear):
        given = [delta for own in deltas for delta in own if delta is not None]
        self.rank = max(16, triton.next_power_of_2(max(len(delta.down_RI) for delta in given)))
        self.members, parts = len(deltas), len(deltas[0])
        self.width, self.k, self.dtype, device = parts * self.rank, owner.k, owner.dtype, owner.device
        nothing = torch.zeros(self.rank, self.k, dtype=self.dtype, device=device)
        self._kept: list[Tensor] = [nothing]
        downs: list[list[Tensor]] = []
        ups: list[list[Tensor | None]] = []
        for own in deltas:
            downs.append([nothing if delta is None else self._padded(delta.down_RI, 0) for delta in own])
            ups.append([None if delta is None else self._padded(delta.up_OR, 1) for delta in own])
        self.down_table = block_addresses(downs, device)
        halves = [[part] for part in range(parts)] if owner.glu else [list(range(parts))]  # gate and up are one launch
        counts = [size // BLOCK_N for size in (owner.sizes * 2 if owner.glu else owner.sizes)]
        numbers = [part for half in halves for part in half for _ in range(counts[part])]
        self.parts = torch.tensor(numbers, dtype=torch.int32, device=device)
        blocks: list[int] = []
        for half, own_ups in itertools.product(halves, ups):
            for part in half:
                up = own_ups[part]
                blocks += [0] * counts[part] if up is None else block_addresses([[up]], device).tolist()
        self.table = torch.tensor(blocks, device=device)

    def _padded(self, factor: Tensor, axis: int) -> Tensor:
        shape = list(factor.shape)
        shape[axis] = self.rank
        padded = torch.zeros(shape, dtype=self.dtype, device=factor.device)
        padded.narrow(axis, 0, factor.shape[axis]).copy_(factor)
        self._kept.append(padded)
        return padded

    def __call__(self, x_MBK: Tensor) -> Tensor:
        members, slots, _ = x_MBK.shape
        layout = layout_of(members, slots, self.rank, self.width, self.k, True, self.dtype)
        low = torch.empty(layout.splits, members, slots, self.width, device=x_MBK.device)
        launch(layout, self.down_table, x_MBK, low, members, slots, self.width, self.k, self.dtype)
        return low
