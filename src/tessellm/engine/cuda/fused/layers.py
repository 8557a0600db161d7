"""FusedLinear: one launch for all linear layers that read the same input, for all members, with low-rank deltas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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
THIN = 1  # rows up to which sums in registers beat matrix units; never where members have deltas
SHORT = 10_000_000  # numbers of one member's weights that are read so fast that sums in several pieces pay
MOST_BLOCK_R = 64  # rows per program, but for large blocks
LARGE = 128  # rows and output rows per large block
LARGE_DELTA_ROWS = 128  # rows up to which weights of members with deltas have no large blocks
MULTIPROCESSORS = 132  # of an H200
MOST_LARGE_SPLITS = 3  # pieces of sums in large blocks, unless programs are fewer than multiprocessors: all are read
WIDEST_BLOCK = 64  # output rows per program
PROGRAMS = 2 * MULTIPROCESSORS  # a launch with fewer is split along its sums
EARLY_ROWS = 16  # rows up to which matrix products begin early
SHORTEST_SUM = 512  # shortest piece that a sum is split into
ROWS_APART = 16  # rows per program up to which deltas have programs of their own beside those of split sums
PARTS_APART = 32  # parts of the low-rank input per program of its own
LEAST_PARTS = 8  # parts of the low-rank input per split that adds deltas itself
NUMBERS_AT_ONCE = 8192  # numbers of those parts that a program reads together
NO_DELTAS: dict[str, Any] = {
    "MEMBERS": 0, "RANK": 0, "CHUNK": 16, "LOW_PARTS": 0, "OWN_PARTS": 1, "AT_ONCE": 1, "APART": False,
    "NEXT_RANK": 0, "NEXT_CHUNK": 16,
}  # fmt: skip


@dataclass(frozen=True)
class LaunchWeights:
    """The weights of a launch, found through tables of addresses, and what is done with their products."""

    table: Tensor
    k: int  # inputs
    out: int  # outputs
    unit: int  # a block of outputs stays inside one of the layers: their sizes' common divisor
    dtype: torch.dtype
    splits: bool  # whether sums may be split
    thin: bool = True  # whether a row or few may have sums in registers, which add no deltas
    large_from: int | None = None  # more rows than this have large blocks, which read less of the caches
    up_table: Tensor | None = None
    bias_table: Tensor | None = None
    glu: int = 0
    cap: float | None = None
    early: bool = False  # may begin before its inputs are there: no product of this kind comes right before it
    whole: tuple[Tensor, Tensor] | None = None  # the one weight that all rows read, and the other one of gate and up


class LaunchRows(NamedTuple):
    """The rows of a launch: groups of weights, rows per group, members whose rows they are."""

    groups: int
    rows: int
    members: int = 1


class FusedLinear:
    """y = W x for layers that read the same x: [M, B, in] to [pieces, M, B, sum of outs]. Readers add pieces up.

    `members[m]` holds member m's modules; with `glu` there are two, gate and up, and y = act(gate) · up. Members that
    share all weights are one group whose rows are all members'; else each member is a group.
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
        first = layers[0][0].weight
        self.shared = all(
            _places(layer) == _places(like) for own in layers for layer, like in zip(own, layers[0], strict=True)
        )
        groups = layers[:1] if self.shared else layers
        parts = [[layer.weight for layer in own] for own in groups]
        gates = [own[:1] for own in parts] if glu else parts
        biases = [[layer.bias for layer in own] for own in groups]
        biased = biases[0][0] is not None
        if any((bias is not None) != biased for own in biases for bias in own) or (biased and glu):
            raise ValueError("biases of some layers alone, or inside an activation")
        sizes, device, plain = [weight.shape[0] for weight in gates[0]], first.device, not any(map(any, deltas))
        self.weights = LaunchWeights(
            table=block_addresses(gates, device),
            k=first.shape[1],
            out=sum(sizes),
            unit=math.gcd(*sizes),
            dtype=first.dtype,
            splits=splits,
            thin=plain,
            large_from=MOST_BLOCK_R if plain else LARGE_DELTA_ROWS,
            up_table=block_addresses([own[1:] for own in parts], device) if glu else None,
            bias_table=block_addresses(biases, device) if biased else None,
            glu=glu,
            cap=cap,
            early=early,
            whole=(parts[0][0], parts[0][-1]) if self.shared and len(gates[0]) == 1 else None,
        )
        self.out_dtype = out_dtype or first.dtype
        self.parts, self.biases = parts, biases  # per group; kept, since kernels know addresses alone
        self.deltas: Deltas | None = None
        if not plain:
            if not self.shared:
                raise ValueError("deltas are added to a shared weight")
            self.deltas = Deltas(deltas, sizes * 2 if glu else sizes, self.weights.k, first.dtype, device)

    def __call__(self, x_MBK: Tensor, low: Low | None = None, made: Low | None = None) -> Tensor:
        """Multiply. `low`: the deltas' low-rank input, if the kernel that made x made it, too; `made`: room for that of
        the layer that reads y."""
        members, slots, _ = x_MBK.shape
        rows, layout = self._laid_out(members, slots)
        if low is None and self.deltas is not None:
            low = self._low(x_MBK, self.deltas)
        dtype = torch.float32 if layout.splits > 1 else self.out_dtype
        y = torch.empty(layout.pieces(low), members, slots, self.weights.out, dtype=dtype, device=x_MBK.device)
        launch(layout, self.weights, rows, x_MBK, y, low, made)
        return y

    def low_for(self, reader: FusedLinear, members: int, slots: int) -> Low | None:
        """Make room for the low-rank input of the reader's deltas, which a call can fill; None if there are none, or it
        cannot."""
        _, layout = self._laid_out(members, slots)
        if reader.deltas is None or not self.shared or layout.thin or layout.splits > 1 or layout.large:
            return None  # large blocks have no registers left for it, nor their readers for so many parts
        return reader.deltas.room(self.weights.out // layout.settings["BLOCK_N"], members, slots)

    def _laid_out(self, members: int, slots: int) -> tuple[LaunchRows, Layout]:
        rows = LaunchRows(1, members * slots, members) if self.shared else LaunchRows(members, slots, members)
        return rows, layout_of(self.weights, rows)

    def _low(self, x_MBK: Tensor, deltas: Deltas) -> Low:
        """Compute the deltas' low-rank input by a launch of its own."""
        members, slots, _ = x_MBK.shape
        weights = LaunchWeights(
            deltas.down_table, self.weights.k, deltas.width, deltas.rank, self.weights.dtype, splits=True
        )
        rows = LaunchRows(members, slots)
        layout = layout_of(weights, rows)
        low = deltas.room(layout.splits, members, slots)
        launch(layout, weights, rows, x_MBK, low.numbers_SMBL)
        return low


def _places(layer: nn.Module) -> list[int]:
    """List the addresses of a layer's numbers."""
    return [parameter.data_ptr() for parameter in layer.parameters()]


@dataclass(frozen=True)
class Layout:
    """How a launch is laid out."""

    thin: bool
    splits: int
    settings: dict[str, Any]

    @property
    def large(self) -> bool:
        return bool(self.settings["BLOCK_R"] == LARGE)

    @property
    def apart(self) -> bool:
        """Whether deltas have programs of their own."""
        return self.splits > 1 and self.settings["BLOCK_R"] <= ROWS_APART

    def pieces(self, low: Low | None) -> int:
        """Count the pieces whose sum is y: one per split, and one per program that adds deltas and nothing else."""
        return self.splits + (-(-len(low.numbers_SMBL) // PARTS_APART) if low is not None and self.apart else 0)

    def reading(self, low: Low) -> dict[str, Any]:
        """Share the parts of the deltas' low-rank input out to a launch's programs."""
        parts = len(low.numbers_SMBL)
        own = min(parts, PARTS_APART if self.apart else max(LEAST_PARTS, -(-parts // self.splits)))
        room = max(1, NUMBERS_AT_ONCE // (self.settings["BLOCK_R"] * low.deltas.rank))
        at_once = min(triton.next_power_of_2(own), room)
        return {"LOW_PARTS": parts, "OWN_PARTS": own, "AT_ONCE": at_once, "APART": self.apart}


def layout_of(weights: LaunchWeights, launched: LaunchRows) -> Layout:
    """Choose the layout that was fastest on one H200 (benchmarks/fused_linear.py)."""
    rows, out, itemsize = launched.rows, weights.out, weights.dtype.itemsize
    padded = triton.next_power_of_2(rows)
    short = launched.groups == 1 and weights.splits and out * weights.k <= SHORT
    if weights.thin and rows <= THIN and not short:
        size = {"BLOCK_N": 2, "BLOCK_K": 1024} if weights.k > 4096 else {"BLOCK_N": 8, "BLOCK_K": 256}
        return Layout(True, 1, {"BLOCK_R": padded, "num_warps": 4, **size})
    most_splits = max(1, weights.k // SHORTEST_SUM) if weights.splits else 1
    large = weights.large_from is not None and rows > weights.large_from
    if large and weights.unit % LARGE == 0 and itemsize == 2:
        programs = launched.groups * (out // LARGE) * -(-rows // LARGE)
        splits = _splits(programs, most_splits)
        sizes = {"BLOCK_R": LARGE, "BLOCK_N": LARGE, "BLOCK_K": 64, "num_warps": 8, "num_stages": 4}
        return Layout(False, splits, {**sizes, "PRECISION": "ieee"})
    block_n = next(size for size in (64, 32, 16) if weights.unit % size == 0 and size <= WIDEST_BLOCK)
    splits = min(-(-PROGRAMS // (launched.groups * out // block_n)), most_splits)
    most, stages = (MOST_BLOCK_R, 5) if itemsize == 2 else (16, 3)  # as many as fit
    block_r = min(max(16, padded), most)
    settings = {"BLOCK_R": block_r, "BLOCK_N": block_n, "BLOCK_K": 64, "num_warps": 4, "num_stages": stages}
    return Layout(False, splits, {**settings, "PRECISION": "ieee"})


def _splits(programs: int, most: int) -> int:
    """Choose into how many pieces large blocks split their sums: as few as leave the fewest multiprocessors idle."""
    choices = range(1, min(most, max(MOST_LARGE_SPLITS, MULTIPROCESSORS // programs)) + 1)
    return min(choices, key=lambda splits: (-(-programs * splits // MULTIPROCESSORS) / splits, splits))


def launch(
    layout: Layout,
    weights: LaunchWeights,
    launched: LaunchRows,
    x: Tensor,
    y: Tensor,
    low: Low | None = None,
    made: Low | None = None,
) -> None:
    """Launch a linear kernel; `low` and `made` as for a FusedLinear."""
    table, out, rows, cap = weights.table, weights.out, launched.rows, weights.cap
    row_blocks = -(-rows // layout.settings["BLOCK_R"])
    grid = (out // layout.settings["BLOCK_N"] * row_blocks, launched.groups, len(y))
    up_table, bias_table = (table if other is None else other for other in (weights.up_table, weights.bias_table))
    common: dict[str, Any] = {"K": weights.k, "TABLE_N": BLOCK_N, "GLU": weights.glu, "CAP": cap is not None}
    common |= {"BIAS": weights.bias_table is not None, "SPLITS": layout.splits, "WEIGHT": TYPES[weights.dtype]}
    common |= layout.settings
    if layout.thin:
        common |= overlapping(x.device)
        thin_kernel[grid](x, y, table, up_table, bias_table, rows, out // BLOCK_N, out, cap or 1.0, **common)
        return
    early = weights.early and rows <= EARLY_ROWS
    common |= {"WHOLE": weights.whole is not None, "EARLY": early, **overlapping(x.device, early)}
    own, width, following = (x, x, table), 0, (x, x)
    sizes = dict(NO_DELTAS)
    if low is not None:
        deltas, width = low.deltas, low.deltas.width
        own = (low.numbers_SMBL, deltas.up_OC, deltas.parts)
        sizes |= {"MEMBERS": launched.members, "RANK": deltas.rank, "CHUNK": deltas.chunk}
        sizes |= layout.reading(low)
    if made is not None:
        following = (made.numbers_SMBL, made.deltas.down_MLK)
        sizes |= {"MEMBERS": launched.members, "NEXT_RANK": made.deltas.rank, "NEXT_CHUNK": made.deltas.chunk}
    linear_kernel[grid](
        x, y, *(weights.whole or (table, up_table)), bias_table, *own, *following, rows, out // BLOCK_N, out,
        cap or 1.0, width, rows // launched.members, ROW_BLOCKS=row_blocks, **sizes, **common,
    )  # fmt: skip
