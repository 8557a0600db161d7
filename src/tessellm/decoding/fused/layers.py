"""FusedLinear: one launch for all linear layers that read the same input, of all members, low-rank deltas included."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from ..low_rank import LowRank, read_low_rank
from .kernels import linear_kernel, thin_kernel

TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
BLOCK_N = 16  # output rows an address stands for
THIN = 4  # rows up to which sums in registers beat matrix units


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
    """y = W norm(x) for parts that read the same x: [groups, rows, in] to [groups, rows, sum of parts' out].

    `members[m]` holds member m's modules, one a part; with `glu` the two parts are gate and up, and y = act(gate) · up.
    Members that share all weights are one group whose rows are all members'; else each member is a group.
    """

    def __init__(
        self,
        members: Sequence[Sequence[nn.Module]],
        norms: Sequence[Tensor] | None = None,
        glu: int = 0,
        eps: float = 0.0,
        gain_offset: float = 0.0,
        cap: float | None = None,
        out_dtype: torch.dtype | None = None,
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
        self.members, self.glu, self.eps, self.gain_offset, self.cap = len(members), glu, eps, gain_offset, cap
        groups = layers[:1] if self.shared else layers
        parts = [[layer.weight for layer in own] for own in groups]
        gates = [own[:1] for own in parts] if glu else parts
        self.table = block_addresses(gates, self.device)
        self.up_table = block_addresses([own[1:] for own in parts], self.device) if glu else self.table
        self.out = sum(weight.shape[0] for weight in gates[0])
        self.blocks = self.out // BLOCK_N
        self.unit = math.gcd(*(weight.shape[0] for weight in parts[0]))  # a launch's blocks stay inside a part
        biases = [[layer.bias for layer in own] for own in groups]
        self.biased = biases[0][0] is not None
        self.bias_table = block_addresses(biases, self.device) if self.biased else self.table
        self.normed = norms is not None
        self.gains = addresses(norms[: len(groups)] if norms else [one], self.device)
        self.out_dtype = out_dtype or self.dtype
        self._kept = (parts, biases, norms)
        self.low: _Low | None = _Low(deltas, norms, self, glu) if any(any(own) for own in deltas) else None
        if self.low is not None and not self.shared:
            raise ValueError("deltas are added to a shared weight")

    def __call__(self, x_MBK: Tensor, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        members, slots, k = x_MBK.shape
        groups, rows = (1, members * slots) if self.shared else (members, slots)
        y = torch.empty(members, slots, self.out, dtype=self.out_dtype, device=x_MBK.device) if out is None else out
        low = self.low(x_MBK) if self.low is not None else None
        launch(
            self.table, x_MBK, y, groups, rows, self.blocks, self.out, k, self.dtype,
            up_table=self.up_table, gains=self.gains, biases=self.bias_table, residual=residual, normed=self.normed,
            glu=self.glu, biased=self.biased, cap=self.cap, eps=self.eps, gain_offset=self.gain_offset,
            low=low, delta=self.low, rows_a_member=slots, unit=self.unit,
        )  # fmt: skip
        return y


def launch(
    table: Tensor, x: Tensor, y: Tensor, groups: int, rows: int, blocks: int, out: int, k: int, dtype: torch.dtype,
    up_table: Tensor | None = None, gains: Tensor | None = None, biases: Tensor | None = None,
    residual: Tensor | None = None, normed: bool = False, glu: int = 0, biased: bool = False, cap: float | None = None,
    eps: float = 0.0, gain_offset: float = 0.0, low: Tensor | None = None, delta: _Low | None = None,
    rows_a_member: int = 1, splits: int = 1, unit: int = BLOCK_N,
) -> None:  # fmt: skip
    """One launch of the linear kernel."""
    kernel, settings = (
        (thin_kernel, thin_layout(rows, glu)) if rows <= THIN else (linear_kernel, wide_layout(rows, unit))
    )
    kernel[(out // settings["BLOCK_N"], groups, splits)](
        x, y, table, table if up_table is None else up_table, table if gains is None else gains,
        table if biases is None else biases, x if residual is None else residual, x if low is None else low,
        table if delta is None else delta.table, table if delta is None else delta.parts,
        rows, blocks, out, eps, gain_offset, cap or 1.0, 0 if delta is None else delta.width, rows, rows_a_member,
        K=k, TABLE_N=BLOCK_N, NORM=normed, GLU=glu, BIAS=biased, ADD=residual is not None,
        CAP=cap is not None, MEMBERS=0 if delta is None else delta.members, RANK=16 if delta is None else delta.rank,
        LOW_SPLITS=1 if delta is None else delta.splits, SPLITS=splits, WEIGHT=TYPES[dtype],
        **settings,
    )  # fmt: skip


def thin_layout(rows: int, glu: int) -> dict[str, int]:
    """The layout of a launch for a few rows; what was fastest on one H200 (benchmarks/fused_linear.py)."""
    return {"BLOCK_R": triton.next_power_of_2(rows), "BLOCK_N": 4, "BLOCK_K": 512, "num_warps": 4}


def wide_layout(rows: int, unit: int) -> dict[str, Any]:
    """The layout of a launch for more rows, likewise."""
    block_n = next(size for size in (64, 32, 16) if unit % size == 0)
    block_r = max(16, triton.next_power_of_2(rows))
    layout = {"BLOCK_R": block_r, "BLOCK_N": block_n, "BLOCK_K": 128, "num_warps": 4, "num_stages": 4}
    return {**layout, "PRECISION": "ieee"}


class _Low:
    """The first halves of all deltas: low = A norm(x) of every row by its own member. The owner adds the rest."""

    def __init__(self, deltas: Sequence[Sequence[LowRank | None]], norms: Any, owner: FusedLinear, glu: int):
        given = [delta for own in deltas for delta in own if delta is not None]
        self.rank = max(16, triton.next_power_of_2(max(len(delta.down_RI) for delta in given)))
        self.members, parts = len(deltas), len(deltas[0])
        self.width, self.k, self.normed = parts * self.rank, owner.k, owner.normed
        self.eps, self.gain_offset, self.dtype, device = owner.eps, owner.gain_offset, owner.dtype, owner.device
        self.splits = 1 if self.normed else max(1, self.k // 1024)
        nothing = torch.zeros(self.rank, self.k, dtype=self.dtype, device=device)
        self._kept: list[Tensor] = [nothing]
        downs: list[list[Tensor]] = []
        ups: list[list[Tensor | None]] = []
        for own in deltas:
            downs.append([nothing if delta is None else self._padded(delta.down_RI, 0) for delta in own])
            ups.append([None if delta is None else self._padded(delta.up_OR, 1) for delta in own])
        self.down_table = block_addresses(downs, device)
        self.gains = addresses([norms[0]] * self.members, device) if norms else self.down_table
        sizes = [owner.out] * 2 if glu else [layer.shape[0] for layer in owner._kept[0][0]]
        columns = [[part] for part in range(parts)] if glu else [list(range(parts))]  # of each launch's halves
        table: list[int] = []
        self.parts = torch.tensor([p for half in columns for p in half for _ in range(sizes[p] // BLOCK_N)],
                                  dtype=torch.int32, device=device)  # fmt: skip
        for half in columns:
            for own_ups in ups:
                for part in half:
                    up, count = own_ups[part], sizes[part] // BLOCK_N
                    step = 0 if up is None else up.stride(0) * up.element_size() * BLOCK_N
                    start = 0 if up is None else up.data_ptr()
                    table += [start + block * step for block in range(count)]
        self.table = torch.tensor(table, device=device)

    def _padded(self, factor: Tensor, axis: int) -> Tensor:
        shape = list(factor.shape)
        shape[axis] = self.rank
        padded = torch.zeros(shape, dtype=self.dtype, device=factor.device)
        padded.narrow(axis, 0, factor.shape[axis]).copy_(factor)
        self._kept.append(padded)
        return padded

    def __call__(self, x_MBK: Tensor) -> Tensor:
        members, slots, _ = x_MBK.shape
        low = torch.empty(self.splits, members, slots, self.width, device=x_MBK.device)
        launch(
            self.down_table, x_MBK, low, members, slots, self.width // BLOCK_N, self.width, self.k, self.dtype,
            gains=self.gains, normed=self.normed, eps=self.eps, gain_offset=self.gain_offset, splits=self.splits,
        )  # fmt: skip
        return low
