"""FusedLinear: one launch for all linear layers that read the same input, of all members, low-rank deltas included."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from ...members.low_rank import read_low_rank
from .addresses import BLOCK_N, block_addresses
from .kernels import linear_kernel, thin_kernel
from .low import Deltas, Low
from .overlap import overlapping

TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
THIN = 1  # rows up to which sums in registers beat matrix units; never those of members with deltas
MOST_BLOCK_R = 64  # rows of one program, but for large blocks
LARGE = 128  # rows and output rows of those; weights of members with deltas have none
MULTIPROCESSORS = 132  # of an H200
WIDEST_BLOCK = 64  # of output rows, for one program
PROGRAMS = 2 * MULTIPROCESSORS  # a launch with fewer is split along its sums
EARLY_ROWS = 16  # up to which matrix products begin early
SHORTEST_SUM = 512  # but not into pieces shorter than this
ROWS_APART = 16  # of a program, up to which deltas have programs of their own beside those of split sums
PARTS_APART = 32  # of what deltas need, for each of them
LEAST_PARTS = 8  # for each split that adds deltas itself
NUMBERS_AT_ONCE = 8192  # of its parts that a program reads together
NO_DELTAS: dict[str, Any] = {
    "MEMBERS": 0, "RANK": 0, "CHUNK": 16, "LOW_PARTS": 0, "OWN_PARTS": 1, "AT_ONCE": 1, "APART": False,
    "NEXT_RANK": 0, "NEXT_CHUNK": 16,
}  # fmt: skip


class FusedLinear:
    """y = W x for parts that read the same x: [M, B, in] to [pieces, M, B, sum of parts' out]. Readers add pieces up.

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
        early: bool = True,
    ):
        """`early`: no product of this kind comes right before it, so that it may begin before its inputs are there."""
        deltas = [[read_low_rank(module) for module in modules] for modules in members]
        layers: list[list[Any]] = [
            [module if delta is None else delta.base_layer for module, delta in zip(modules, own, strict=True)]
            for modules, own in zip(members, deltas, strict=True)
        ]
        one = layers[0][0].weight
        self.device, self.dtype, self.k = one.device, one.dtype, one.shape[1]
        self.shared = all(
            _places(layer) == _places(first) for own in layers for layer, first in zip(own, layers[0], strict=True)
        )
        self.members, self.glu, self.cap, self.may_split, self.early = len(members), glu, cap, splits, early
        groups = layers[:1] if self.shared else layers
        parts = [[layer.weight for layer in own] for own in groups]
        gates = [own[:1] for own in parts] if glu else parts
        self.table = block_addresses(gates, self.device)
        self.up_table = block_addresses([own[1:] for own in parts], self.device) if glu else self.table
        self.whole = (parts[0][0], parts[0][-1]) if self.shared and len(gates[0]) == 1 else None
        self.sizes = [weight.shape[0] for weight in gates[0]]
        self.out = sum(self.sizes)
        self.unit = math.gcd(*self.sizes)  # a launch's blocks stay inside a part
        biases = [[layer.bias for layer in own] for own in groups]
        self.biased = biases[0][0] is not None
        if any((bias is not None) != self.biased for own in biases for bias in own) or (self.biased and glu):
            raise ValueError("biases of some parts alone, or inside an activation")
        self.bias_table = block_addresses(biases, self.device) if self.biased else self.table
        self.out_dtype = out_dtype or self.dtype
        self._kept = (parts, biases)
        self.deltas: Deltas | None = None
        if any(any(own) for own in deltas):
            if not self.shared:
                raise ValueError("deltas are added to a shared weight")
            self.deltas = Deltas(deltas, self.sizes * 2 if glu else self.sizes, self.k, self.dtype, self.device)

    def __call__(self, x_MBK: Tensor, low: Low | None = None, made: Low | None = None) -> Tensor:
        """`low` if whoever made x made what the deltas need of it, too; `made` to do the same for who reads y."""
        members, slots, k = x_MBK.shape
        groups, rows, layout = self._laid_out(members, slots)
        if low is None and self.deltas is not None:
            low = self._low(x_MBK, self.deltas)
        dtype = torch.float32 if layout.splits > 1 else self.out_dtype
        y = torch.empty(layout.pieces(low), members, slots, self.out, dtype=dtype, device=x_MBK.device)
        launch(
            layout, self.table, x_MBK, y, groups, rows, self.out, k, self.dtype, up_table=self.up_table,
            biases=self.bias_table, glu=self.glu, biased=self.biased, cap=self.cap, low=low, made=made, members=members,
            early=self.early, whole=self.whole,
        )  # fmt: skip
        return y

    def low_for(self, reader: FusedLinear, members: int, slots: int) -> Low | None:
        """Room for what the reader's deltas need of y, which a call can fill; None if there are none, or it cannot."""
        _, _, layout = self._laid_out(members, slots)
        if reader.deltas is None or not self.shared or layout.thin or layout.splits > 1:
            return None
        width = layout.settings["BLOCK_N"]
        return reader.deltas.room(self.out // width, members, slots)

    def _laid_out(self, members: int, slots: int) -> tuple[int, int, Layout]:
        groups, rows = (1, members * slots) if self.shared else (members, slots)
        plain = self.deltas is None
        layout = layout_of(groups, rows, self.unit, self.out, self.k, self.may_split, self.dtype, plain, plain)
        return groups, rows, layout

    def _low(self, x_MBK: Tensor, deltas: Deltas) -> Low:
        members, slots, _ = x_MBK.shape
        layout = layout_of(members, slots, deltas.rank, deltas.width, self.k, True, self.dtype)
        low = deltas.room(layout.splits, members, slots)
        launch(layout, deltas.down_table, x_MBK, low.numbers_SMBL, members, slots, deltas.width, self.k, self.dtype)
        return low


def _places(layer: nn.Module) -> list[int]:
    """Where the numbers of a layer lie."""
    return [parameter.data_ptr() for parameter in layer.parameters()]


@dataclass(frozen=True)
class Layout:
    """How a launch is laid out."""

    thin: bool
    splits: int
    settings: dict[str, Any]

    @property
    def apart(self) -> bool:
        """Whether deltas have programs of their own."""
        return self.splits > 1 and self.settings["BLOCK_R"] <= ROWS_APART

    def pieces(self, low: Low | None) -> int:
        """Of y, whose sum it is: one a split, and one for each of the programs that add deltas and nothing else."""
        return self.splits + (-(-len(low.numbers_SMBL) // PARTS_APART) if low is not None and self.apart else 0)

    def reading(self, low: Low) -> dict[str, Any]:
        """How a launch's programs share the parts of what its deltas need."""
        parts = len(low.numbers_SMBL)
        own = min(parts, PARTS_APART if self.apart else max(LEAST_PARTS, -(-parts // self.splits)))
        room = max(1, NUMBERS_AT_ONCE // (self.settings["BLOCK_R"] * low.deltas.rank))
        at_once = min(triton.next_power_of_2(own), room)
        return {"LOW_PARTS": parts, "OWN_PARTS": own, "AT_ONCE": at_once, "APART": self.apart}


def layout_of(
    groups: int, rows: int, unit: int, out: int, k: int, may_split: bool, dtype: torch.dtype, thin: bool = True,
    large: bool = False,
) -> Layout:  # fmt: skip
    """The layout that was fastest on one H200 (benchmarks/fused_linear.py). `thin`: a row or few may have sums in
    registers, which add no deltas. `large`: many may have large blocks, which read less of the caches."""
    padded = triton.next_power_of_2(rows)
    if thin and rows <= THIN:
        size = {"BLOCK_N": 2, "BLOCK_K": 1024} if k > 4096 else {"BLOCK_N": 8, "BLOCK_K": 256}
        return Layout(True, 1, {"BLOCK_R": padded, "num_warps": 4, **size})
    most_splits = max(1, k // SHORTEST_SUM) if may_split else 1
    if large and rows > MOST_BLOCK_R and unit % LARGE == 0 and dtype.itemsize == 2:
        programs = groups * (out // LARGE) * -(-rows // LARGE)
        splits = min(max(1, MULTIPROCESSORS // programs), most_splits)
        sizes = {"BLOCK_R": LARGE, "BLOCK_N": LARGE, "BLOCK_K": 64, "num_warps": 8, "num_stages": 4}
        return Layout(False, splits, {**sizes, "PRECISION": "ieee"})
    block_n = next(size for size in (64, 32, 16) if unit % size == 0 and size <= WIDEST_BLOCK)
    programs = groups * out // block_n
    splits = min(-(-PROGRAMS // programs), most_splits)
    most, stages = (MOST_BLOCK_R, 5) if dtype.itemsize == 2 else (16, 3)  # as many as fit
    block_r = min(max(16, padded), most)
    settings = {"BLOCK_R": block_r, "BLOCK_N": block_n, "BLOCK_K": 64, "num_warps": 4, "num_stages": stages}
    return Layout(False, splits, {**settings, "PRECISION": "ieee"})


def launch(
    layout: Layout, table: Tensor, x: Tensor, y: Tensor, groups: int, rows: int, out: int, k: int, dtype: torch.dtype,
    up_table: Tensor | None = None, biases: Tensor | None = None, glu: int = 0, biased: bool = False,
    cap: float | None = None, low: Low | None = None, made: Low | None = None, members: int = 1, early: bool = False,
    whole: tuple[Tensor, Tensor] | None = None,
) -> None:  # fmt: skip
    """One launch of a linear kernel. `whole`: the one weight that all rows read, and the other one of gate and up."""
    row_blocks = -(-rows // layout.settings["BLOCK_R"])
    grid = (out // layout.settings["BLOCK_N"] * row_blocks, groups, len(y))
    tables = (table, table if up_table is None else up_table, table if biases is None else biases)
    common: dict[str, Any] = {"K": k, "TABLE_N": BLOCK_N, "GLU": glu, "BIAS": biased, "CAP": cap is not None}
    common |= {"SPLITS": layout.splits, "WEIGHT": TYPES[dtype], **layout.settings}
    if layout.thin:
        common |= overlapping(x.device)
        thin_kernel[grid](x, y, *tables, rows, out // BLOCK_N, out, cap or 1.0, **common)
        return
    early = early and rows <= EARLY_ROWS
    if whole is not None:
        tables = (*whole, tables[2])
    common |= {"WHOLE": whole is not None, "EARLY": early, **overlapping(x.device, early)}
    own, width, following = (x, x, table), 0, (x, x)
    sizes = dict(NO_DELTAS)
    if low is not None:
        deltas, width = low.deltas, low.deltas.width
        own = (low.numbers_SMBL, deltas.up_OC, deltas.parts)
        sizes |= {"MEMBERS": members, "RANK": deltas.rank, "CHUNK": deltas.chunk}
        sizes |= layout.reading(low)
    if made is not None:
        following = (made.numbers_SMBL, made.deltas.down_MLK)
        sizes |= {"MEMBERS": members, "NEXT_RANK": made.deltas.rank, "NEXT_CHUNK": made.deltas.chunk}
    linear_kernel[grid](
        x, y, *tables, *own, *following, rows, out // BLOCK_N, out, cap or 1.0, width, rows // members,
        ROW_BLOCKS=row_blocks, **sizes, **common,
    )  # fmt: skip
