"""Parts of kernels that have to do with low-rank deltas. A delta is up · (down · x); `low` is down · x.

The kernel that makes x makes low as well, in parts that the reader adds up. Rows are all members', member by member.
Factors of all members lie side by side, so that one product serves all rows: each row's own member is picked by zeros
elsewhere."""

from __future__ import annotations

import triton
import triton.language as tl

from .overlap import let_next_begin, wait_for_inputs


@triton.jit
def up_block(up_OC, first, n_N, FIRST: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Outputs n behind the first, and a chunk of the members' columns: [N, C]. Depends on nobody."""
    c_C = FIRST + tl.arange(0, CHUNK)
    return tl.load(up_OC + (first + n_N[:, None]) * COLUMNS + c_C[None, :], mask=(c_C < COLUMNS)[None, :], other=0.0)


@triton.jit
def low_of_rows(  # type: ignore[no-untyped-def]
    low_SRL, column, first_part, row_R, rows, low_width,
    RANK: tl.constexpr, PARTS: tl.constexpr, ALL_PARTS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """The sum of PARTS parts from the first on: [R, RANK]."""
    line_RL = row_R[:, None] * low_width + column + tl.arange(0, RANK)[None, :]
    low_RL = tl.zeros((row_R.shape[0], RANK), tl.float32)
    for start in tl.static_range(0, PARTS, AT_ONCE):
        own_S = start + tl.arange(0, AT_ONCE)
        given_S = (own_S < PARTS) & (first_part + own_S < ALL_PARTS)
        given_SR = given_S[:, None] & (row_R < rows)[None, :]
        place_SRL = ((first_part + own_S) * rows * low_width)[:, None, None] + line_RL[None, :, :]
        low_RL += tl.sum(tl.load(low_SRL + place_SRL, mask=given_SR[:, :, None], other=0.0), 0)
    return low_RL


@triton.jit
def delta_of(  # type: ignore[no-untyped-def]
    up_NC, low_RL, row_R, rows_a_member, FIRST: tl.constexpr, CHUNK: tl.constexpr, RANK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """up · low of every row whose member is in the chunk: [R, N]."""
    everywhere = tl.broadcast_to(low_RL[:, None, :], (row_R.shape[0], CHUNK // RANK, RANK))
    own_RC = (row_R // rows_a_member)[:, None] == ((FIRST + tl.arange(0, CHUNK)) // RANK)[None, :]
    low_RC = tl.where(own_RC, tl.reshape(everywhere, (row_R.shape[0], CHUNK)), 0.0)
    return tl.dot(low_RC.to(up_NC.dtype), tl.trans(up_NC), input_precision=PRECISION)


@triton.jit
def down_block(down_CK, n_N, width, FIRST: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """A chunk of the members' columns over inputs n: [C, N]. Depends on nobody."""
    c_C = FIRST + tl.arange(0, CHUNK)
    return tl.load(down_CK + c_C[:, None] * width + n_N[None, :], mask=(c_C < COLUMNS)[:, None], other=0.0)


@triton.jit
def store_low(  # type: ignore[no-untyped-def]
    low_SRL, down_CN, y_RN, part, row_R, rows, rows_a_member,
    FIRST: tl.constexpr, CHUNK: tl.constexpr, RANK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """down · y over the inputs of a block, of rows whose member is in the chunk: one part of low."""
    c_C = FIRST + tl.arange(0, CHUNK)
    low_RC = tl.dot(y_RN, tl.trans(down_CN), input_precision=PRECISION)
    own_RC = (row_R // rows_a_member)[:, None] == (c_C // RANK)[None, :]
    place = (part * rows + row_R[:, None]) * RANK + (c_C % RANK)[None, :]
    tl.store(low_SRL + place, low_RC, mask=(row_R < rows)[:, None] & own_RC)


@triton.jit
def add_deltas_kernel(  # type: ignore[no-untyped-def]
    y_RN, low_RL, up_OC, parts, rows, low_width, out,
    MEMBERS: tl.constexpr, RANK: tl.constexpr, TABLE_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """y += up · low of every row by its own member. Grid: blocks of a member's rows, blocks of outputs, each inside one
    layer, members."""
    member = tl.program_id(2)
    r_R, first = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R), tl.program_id(1) * BLOCK_N
    n_N, l_L = first + tl.arange(0, BLOCK_N), tl.arange(0, RANK)
    column = tl.load(parts + first // TABLE_N) * RANK
    up_NL = tl.load(up_OC + n_N[:, None] * (MEMBERS * RANK) + member * RANK + l_L[None, :])
    row_R, there = (member * rows + r_R).to(tl.int64), (r_R < rows)[:, None]
    wait_for_inputs(OVERLAP)
    let_next_begin(OVERLAP)
    low_RL = tl.load(low_RL + row_R[:, None] * low_width + column + l_L[None, :], mask=there, other=0.0)
    y = y_RN + row_R[:, None] * out + n_N[None, :]
    added_RN = tl.load(y, mask=there, other=0.0).to(tl.float32)
    added_RN += tl.dot(low_RL, tl.trans(up_NL), input_precision="ieee")
    tl.store(y, added_RN.to(y_RN.dtype.element_ty), mask=there)
