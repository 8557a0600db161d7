"""Tables of addresses, by which kernels find weights where they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK_N = 16  # output rows per address


def addresses(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """List where tensors start: at multiples of 16 bytes, row behind row, which the kernels rely on."""
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise ValueError("the rows of a weight do not follow one another")
    if device.type == "cuda" and any(tensor.data_ptr() % 16 for tensor in tensors):
        raise ValueError("a weight does not start at a multiple of 16 bytes")
    return torch.tensor([tensor.data_ptr() for tensor in tensors], device=device)


def block_addresses(rows: Sequence[Sequence[Tensor | None]], device: torch.device) -> Tensor:
    """List per group the address of every block of BLOCK_N rows of its tensors, one after another."""
    table = []
    for tensors in rows:
        for tensor in tensors:
            if tensor is None:
                continue
            addresses([tensor], device)
            if tensor.shape[0] % BLOCK_N:
                raise ValueError(f"a weight has {tensor.shape[0]} rows, which are no whole blocks of {BLOCK_N}")
            step = tensor.stride(0) * tensor.element_size() * BLOCK_N
            table += [tensor.data_ptr() + block * step for block in range(tensor.shape[0] // BLOCK_N)]
    return torch.tensor(table, device=device)
