"""The products of a FusedLinear by the library, for so many rows that it is the faster: layer after layer, and the
deltas on top of them, by one launch for all layers and members, which is that of the activation where there is one.
Nothing is copied: every product goes where it belongs."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from .addresses import BLOCK_N
from .layers import FusedLinear
from .low import Deltas
from .low_kernels import add_deltas_kernel
from .overlap import overlapping
from .prompt_kernels import gate_kernel

ADDED_ROWS = 64  # rows per program that adds deltas
ADDED_OUTPUTS = (128, 64, 32, 16)  # outputs per program: the first that the layers are multiples of
GATED, GATED_WITH_DELTAS = (1, 1024), (32, 128)  # rows and outputs of gate and up per program


def multiply(linear: FusedLinear, x_MBK: Tensor) -> Tensor:
    """Multiply: [M, B, in] to [M, B, all outputs side by side], or, of gate and up, act(gate) · up."""
    y_MBO = _multiply(linear, x_MBK)
    if linear.weights.glu:
        return _gated(linear, x_MBK, y_MBO)
    if linear.deltas is not None:
        _add_deltas(linear.deltas, x_MBK, y_MBO, linear.weights.unit)
    return y_MBO


def _multiply(linear: FusedLinear, x_MBK: Tensor) -> Tensor:
    """Multiply without deltas and activation."""
    members, rows, width = x_MBK.shape
    weights, biases = linear.parts, linear.biases
    sizes = [len(weight) for weight in weights[0]]
    y_MBO = torch.empty(members, rows, sum(sizes), dtype=linear.weights.dtype, device=x_MBK.device)
    x_GRK, y_GRO = x_MBK.reshape(len(weights), -1, width), y_MBO.view(len(weights), -1, sum(sizes))
    for x_RK, y_RO, own, added in zip(x_GRK, y_GRO, weights, biases, strict=True):
        for weight, bias, out in zip(own, added, y_RO.split(sizes, 1), strict=True):
            if bias is None:
                torch.mm(x_RK, weight.T, out=out)
            else:
                torch.addmm(bias, x_RK, weight.T, out=out)
    return y_MBO


def _gated(linear: FusedLinear, x_MBK: Tensor, both_MBO: Tensor) -> Tensor:
    """Compute act(gate) · up of both side by side, each with its deltas."""
    members, rows, _ = x_MBK.shape
    width, deltas = linear.weights.out, linear.deltas
    y_MBN = torch.empty(members, rows, width, dtype=both_MBO.dtype, device=both_MBO.device)
    low, up, low_width, rank, (block_r, block_n) = both_MBO, both_MBO, 0, 0, GATED
    if deltas is not None:
        low, up, low_width, rank = _low(deltas, x_MBK), deltas.up_OC, deltas.width, deltas.rank
        block_r, block_n = GATED_WITH_DELTAS
    gate_kernel[(triton.cdiv(rows, block_r), triton.cdiv(width, block_n), members)](
        both_MBO, y_MBN, low, up, rows, low_width, WIDTH=width, MEMBERS=members, RANK=rank, BLOCK_R=block_r,
        BLOCK_N=block_n, GLU=linear.weights.glu, **overlapping(x_MBK.device),
    )  # fmt: skip
    return y_MBN


def wide_logits(head: FusedLinear, x_MBK: Tensor) -> Tensor:
    """Multiply by the output layer, into float32, and cap: [M, B, in] to [M, B, vocabulary]."""
    members, rows, width = x_MBK.shape
    x_GRK = x_MBK.reshape(len(head.parts), -1, width)
    y_GRO = torch.empty(*x_GRK.shape[:2], head.weights.out, dtype=torch.float32, device=x_MBK.device)
    for x_RK, y_RO, own in zip(x_GRK, y_GRO, head.parts, strict=True):
        if x_RK.dtype == torch.float32:
            torch.mm(x_RK, own[0].T, out=y_RO)
        else:
            torch.mm(x_RK, own[0].T, out_dtype=torch.float32, out=y_RO)
    if (cap := head.weights.cap) is not None:
        y_GRO.div_(cap).tanh_().mul_(cap)
    return y_GRO.view(members, rows, -1)


def _add_deltas(deltas: Deltas, x_MBK: Tensor, y_MBO: Tensor, unit: int) -> None:
    """Add up · (down · x) of every layer. `unit`: the layers' sizes are multiples of it."""
    members, rows, out = y_MBO.shape
    low_MBL = _low(deltas, x_MBK)
    block_n = next(size for size in ADDED_OUTPUTS if unit % size == 0)
    add_deltas_kernel[(triton.cdiv(rows, ADDED_ROWS), out // block_n, members)](
        y_MBO, low_MBL, deltas.up_OC, deltas.parts, rows, deltas.width, out, MEMBERS=members, RANK=deltas.rank,
        TABLE_N=BLOCK_N, BLOCK_R=ADDED_ROWS, BLOCK_N=block_n, **overlapping(x_MBK.device),
    )  # fmt: skip


def _low(deltas: Deltas, x_MBK: Tensor) -> Tensor:
    """Compute down · x of every layer, by each row's own member: [M, B, layers · rank]."""
    return torch.bmm(x_MBK, deltas.down_MLK.transpose(1, 2))
