"""Products of a pass, by the faster of two ways: one launch of ours for all members and all layers that read one input,
or, where rows are many, the library one by one.

How many rows are many was measured on an H200 in the shapes of google/gemma-2-2b: a product of ours
is for one wave of programs, and gate and up, the largest, with deltas, have too little room in registers.
"""

from __future__ import annotations

from torch import Tensor

from .layers import FusedLinear
from .library import multiply
from .low import Low

# rows per weight up to which products are ours, in half precision
OWN_ROWS = 256
OWN_ROWS_OF_THREE = 512  # of queries, keys and values, which are three products of the library
OWN_GATED_ROWS = 128  # of gate and up
OWN_GATED_ROWS_WITH_DELTAS = 64
OWN_WIDE_ROWS = 16  # of all, in float32, where our products have small blocks


def is_own(linear: FusedLinear, x_MBK: Tensor) -> bool:
    """Whether this product is one launch of ours."""
    members, rows, _ = x_MBK.shape
    rows *= members if linear.shared else 1
    if linear.weights.dtype.itemsize > 2:
        return rows <= OWN_WIDE_ROWS
    if linear.weights.glu:
        return rows <= (OWN_GATED_ROWS if linear.deltas is None else OWN_GATED_ROWS_WITH_DELTAS)
    return rows <= (OWN_ROWS_OF_THREE if linear.shared and len(linear.parts[0]) == 3 else OWN_ROWS)


def product(linear: FusedLinear, x_MBK: Tensor, low: Low | None = None) -> Tensor:
    """Multiply; y in pieces. `low`: the deltas' low-rank input, if the kernel that made x made it, too."""
    return linear(x_MBK, low) if is_own(linear, x_MBK) else multiply(linear, x_MBK)[None]


def mlp_product(mlp: FusedLinear, down: FusedLinear, x_MBK: Tensor, low: Low | None = None) -> Tensor:
    """Multiply by gate and up, and what comes of them by down; y in pieces."""
    if not is_own(mlp, x_MBK):
        return product(down, multiply(mlp, x_MBK))
    made = mlp.low_for(down, *x_MBK.shape[:2])
    return product(down, mlp(x_MBK, low, made)[0], made)
