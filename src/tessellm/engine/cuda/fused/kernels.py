"""The kernels of a fused decoding step. Weights are found through tables of addresses, so nothing is copied or moved.

Rows are the new tokens, one a slot and member. A table holds the address of every block of BLOCK_N output rows of a
weight, so that layers which read the same input (queries, keys and values; gate and up) are one launch, and so that
the weights of all members are. All sums are in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .low_kernels import delta_of, down_block, low_of_rows, store_low, up_block
from .overlap import let_next_begin, wait_for_inputs


@triton.jit
def _at(table, index, pointer: tl.constexpr):  # type: ignore[no-untyped-def]
    """The address in a table, as a pointer to a multiple of 16 bytes: unless that is said, loads are narrow."""
    address = tl.multiple_of(tl.load(table + index), 16)
    return tl.multiple_of(address.to(pointer), 16)


@triton.jit
def _rows_at(  # type: ignore[no-untyped-def]
    table, block, ROWS: tl.constexpr, K: tl.constexpr, WHOLE: tl.constexpr, pointer: tl.constexpr
):  # fmt: skip
    """Where a block of rows begins, by the table; that may be the WHOLE weight, and nothing has to be read first."""
    return table + block.to(tl.int64) * (ROWS * K) if WHOLE else _at(table, block, pointer)


@triton.jit
def _activate(x, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    if kind == 1:  # silu
        return x * tl.sigmoid(x)
    inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)  # gelu, by its tanh form
    return 0.5 * x * (1 + (2 * tl.sigmoid(2 * inner) - 1))


@triton.jit
def linear_kernel(  # type: ignore[no-untyped-def]
    x_GRK, y_GRN, weight_table, up_weight_table, bias_table, low_SRL, up_OC, part_table, next_low, next_down,
    rows, blocks, out_width, cap, low_width, rows_a_member,
    K: tl.constexpr, BLOCK_R: tl.constexpr, TABLE_N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GLU: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr, MEMBERS: tl.constexpr, RANK: tl.constexpr,
    CHUNK: tl.constexpr, LOW_PARTS: tl.constexpr, OWN_PARTS: tl.constexpr, AT_ONCE: tl.constexpr, APART: tl.constexpr,
    NEXT_RANK: tl.constexpr, NEXT_CHUNK: tl.constexpr, SPLITS: tl.constexpr, WEIGHT: tl.constexpr,
    PRECISION: tl.constexpr, ROW_BLOCKS: tl.constexpr, WHOLE: tl.constexpr, EARLY: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """y = W x [+ deltas] [+ bias], or act(W x) · (W' x), [capped]. Grid: blocks, groups, pieces of y.
    Neighbouring programs have the same weights and other blocks of rows, so that those are read from memory once.

    With deltas (RANK > 0) the rows of all members read one weight, and each adds its own up · low, CHUNK columns of all
    members' at a time; with NEXT_RANK the low of the layer that reads y comes along, a part a block. With SPLITS > 1
    each has a piece of y, which who reads y adds up. So it does not matter which of them adds which delta: each adds
    those of OWN_PARTS parts of low, or, APART, pieces behind them are these and nothing else.
    """
    let_next_begin(OVERLAP)
    place = tl.program_id(0) // ROW_BLOCKS
    block, group, split = place * (BLOCK_N // TABLE_N), tl.program_id(1), tl.program_id(2)
    row_R = tl.program_id(0) % ROW_BLOCKS * BLOCK_R + tl.arange(0, BLOCK_R)
    n_N = tl.arange(0, BLOCK_N)
    real_R = row_R < rows
    pointer: tl.constexpr = tl.pointer_type(WEIGHT)
    span: tl.constexpr = (K + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K) * BLOCK_K  # whole blocks: loads stay aligned
    weight = _rows_at(weight_table, group * blocks + block, TABLE_N, K, WHOLE, pointer)
    if GLU > 0:
        up_weight = _rows_at(up_weight_table, group * blocks + block, TABLE_N, K, WHOLE, pointer)
    held: tl.constexpr = BLOCK_R <= 16  # there is room to hold deltas' factors meanwhile
    first_part = 0 if SPLITS == 1 else (split - SPLITS if APART else split) * OWN_PARTS
    adds_deltas = first_part >= 0 and first_part < LOW_PARTS
    if RANK > 0:
        column = tl.load(part_table + block) * RANK
        low_RL = tl.zeros((BLOCK_R, RANK), tl.float32)
        up_NC = tl.zeros((BLOCK_N, CHUNK), WEIGHT)
        if GLU > 0:
            second_column = tl.load(part_table + blocks + block) * RANK
            second_RL, second_up_NC = low_RL, up_NC
    if RANK > 0 and held and adds_deltas:
        up_NC = up_block(up_OC, block * TABLE_N, n_N, 0, CHUNK, MEMBERS * RANK)
        if GLU > 0:
            second_up_NC = up_block(up_OC, out_width + block * TABLE_N, n_N, 0, CHUNK, MEMBERS * RANK)
    if held and NEXT_RANK > 0:
        down_CN = down_block(next_down, block * TABLE_N + n_N, out_width, 0, NEXT_CHUNK, MEMBERS * NEXT_RANK)
    if EARLY:
        wait_for_inputs(OVERLAP)
    if RANK > 0 and adds_deltas:
        low_RL = low_of_rows(
            low_SRL, column, first_part, row_R, rows, low_width, RANK, OWN_PARTS, LOW_PARTS, AT_ONCE
        )  # fmt: skip
        if GLU > 0:
            second_RL = low_of_rows(
                low_SRL, second_column, first_part, row_R, rows, low_width, RANK, OWN_PARTS, LOW_PARTS, AT_ONCE
            )  # fmt: skip
    x = x_GRK + (group * rows + row_R[:, None]) * K
    total_RN = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    up_RN = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    for start in range(0, tl.where(split < SPLITS, span, 0) if APART else span, BLOCK_K):
        k_K = split * span + start + tl.arange(0, BLOCK_K)
        real_K = k_K < K
        x_RK = tl.load(x + k_K[None, :], mask=real_R[:, None] & real_K[None, :], other=0.0)
        w_NK = tl.load(weight + n_N[:, None] * K + k_K[None, :], mask=real_K[None, :], other=0.0)
        total_RN += tl.dot(x_RK.to(w_NK.dtype), tl.trans(w_NK), input_precision=PRECISION)
        if GLU > 0:
            u_NK = tl.load(up_weight + n_N[:, None] * K + k_K[None, :], mask=real_K[None, :], other=0.0)
            up_RN += tl.dot(x_RK.to(u_NK.dtype), tl.trans(u_NK), input_precision=PRECISION)
    if RANK > 0 and adds_deltas:
        for first in tl.static_range(0, MEMBERS * RANK, CHUNK):
            if first > 0 or not held:
                up_NC = up_block(up_OC, block * TABLE_N, n_N, first, CHUNK, MEMBERS * RANK)
            total_RN += delta_of(up_NC, low_RL, row_R, rows_a_member, first, CHUNK, RANK, PRECISION)
            if GLU > 0:
                if first > 0 or not held:
                    second_up_NC = up_block(up_OC, out_width + block * TABLE_N, n_N, first, CHUNK, MEMBERS * RANK)
                up_RN += delta_of(second_up_NC, second_RL, row_R, rows_a_member, first, CHUNK, RANK, PRECISION)
    y_RN = _finish(y_GRN, total_RN, up_RN, bias_table, group, block, blocks, split, row_R, n_N, rows, out_width, cap,
                   TABLE_N, GLU, BIAS, CAP, SPLITS, pointer)  # fmt: skip
    if NEXT_RANK > 0:
        for first in tl.static_range(0, MEMBERS * NEXT_RANK, NEXT_CHUNK):
            if first > 0 or not held:
                down_CN = down_block(
                    next_down, block * TABLE_N + n_N, out_width, first, NEXT_CHUNK, MEMBERS * NEXT_RANK
                )
            store_low(next_low, down_CN, y_RN.to(WEIGHT), place, row_R, rows, rows_a_member, first, NEXT_CHUNK,
                      NEXT_RANK, PRECISION)  # fmt: skip


@triton.jit
def thin_kernel(  # type: ignore[no-untyped-def]
    x_GRK, y_GRN, weight_table, up_weight_table, bias_table, rows, blocks, out_width, cap,
    K: tl.constexpr, BLOCK_R: tl.constexpr, TABLE_N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GLU: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr, SPLITS: tl.constexpr, WEIGHT: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """What linear_kernel does without deltas, for a row or few: products and sums in registers keep more of the memory
    busy. Grid: output rows / BLOCK_N, groups, splits of K."""
    place, group, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    pieces: tl.constexpr = TABLE_N // BLOCK_N
    block, piece = place // pieces, place % pieces
    row_R = tl.arange(0, BLOCK_R)
    n_N = piece * BLOCK_N + tl.arange(0, BLOCK_N)
    real_R = row_R < rows
    pointer: tl.constexpr = tl.pointer_type(WEIGHT)
    weight = _at(weight_table, group * blocks + block, pointer)
    x = x_GRK + (group * rows + row_R[:, None]) * K
    sum_RNK = tl.zeros((BLOCK_R, BLOCK_N, BLOCK_K), tl.float32)
    if GLU > 0:
        up_weight = _at(up_weight_table, group * blocks + block, pointer)
        up_RNK = tl.zeros((BLOCK_R, BLOCK_N, BLOCK_K), tl.float32)
    span: tl.constexpr = (K + SPLITS - 1) // SPLITS
    for start in tl.static_range(0, span, BLOCK_K):
        k_K = split * span + start + tl.arange(0, BLOCK_K)
        real_K = (k_K < K) & (start + tl.arange(0, BLOCK_K) < span)
        w_NK = tl.load(weight + n_N[:, None] * K + k_K[None, :], mask=real_K[None, :], other=0.0)
        if GLU > 0:
            u_NK = tl.load(up_weight + n_N[:, None] * K + k_K[None, :], mask=real_K[None, :], other=0.0)
        if start == 0:
            wait_for_inputs(OVERLAP)
        x_RK = tl.load(x + k_K[None, :], mask=real_R[:, None] & real_K[None, :], other=0.0).to(tl.float32)
        sum_RNK += x_RK[:, None, :] * w_NK.to(tl.float32)[None, :, :]
        if GLU > 0:
            up_RNK += x_RK[:, None, :] * u_NK.to(tl.float32)[None, :, :]
    let_next_begin(OVERLAP)
    total_RN = tl.sum(sum_RNK, 2)
    up_RN = tl.sum(up_RNK, 2) if GLU > 0 else total_RN
    _finish(y_GRN, total_RN, up_RN, bias_table, group, block, blocks, split, row_R, n_N, rows, out_width, cap,
            TABLE_N, GLU, BIAS, CAP, SPLITS, pointer)  # fmt: skip


@triton.jit
def _finish(  # type: ignore[no-untyped-def]
    y_GRN, total_RN, up_RN, bias_table, group, block, blocks, split, row_R, n_N, rows, out_width, cap,
    TABLE_N: tl.constexpr, GLU: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr, SPLITS: tl.constexpr,
    pointer: tl.constexpr,
):  # fmt: skip
    """Bias, activation and cap on the sums of a block, and the block into y; what was stored."""
    if BIAS and split == 0:
        bias = _at(bias_table, group * blocks + block, pointer)
        total_RN += tl.load(bias + n_N).to(tl.float32)[None, :]
    if GLU > 0:
        total_RN = _activate(total_RN, GLU) * up_RN
    if CAP:
        total_RN = cap * (2 * tl.sigmoid(2 * total_RN / cap) - 1)
    place = (group * rows + row_R[:, None]) * out_width + block * TABLE_N + n_N[None, :]
    if SPLITS > 1:
        place += split * tl.num_programs(1) * rows * out_width
    y_RN = total_RN.to(y_GRN.dtype.element_ty)
    tl.store(y_GRN + place, y_RN, mask=(row_R < rows)[:, None])
    return y_RN


@triton.jit
def embed_kernel(  # type: ignore[no-untyped-def]
    token_MB, table_M, gain_table, x_RK, h_RK, slots, scale, rows_a_gain, eps, gain_offset,
    K: tl.constexpr, BLOCK_K: tl.constexpr, WEIGHT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """x = scale · E[token], h = norm(x). Grid: slots, members."""
    wait_for_inputs(OVERLAP)
    let_next_begin(OVERLAP)
    slot, member = tl.program_id(0), tl.program_id(1)
    pointer: tl.constexpr = tl.pointer_type(WEIGHT)
    row = member * slots + slot
    k_K = tl.arange(0, BLOCK_K)
    token = tl.load(token_MB + row)
    x = tl.load(_at(table_M, member, pointer) + token * K + k_K, mask=k_K < K, other=0.0)
    x = (x * scale).to(WEIGHT)
    tl.store(x_RK + row * K + k_K, x, mask=k_K < K)
    gain = tl.load(_at(gain_table, row // rows_a_gain, pointer) + k_K, mask=k_K < K, other=0.0).to(tl.float32)
    tl.store(h_RK + row * K + k_K, _normed(x.to(tl.float32), gain + gain_offset, eps, K).to(WEIGHT), mask=k_K < K)


@triton.jit
def residual_kernel(  # type: ignore[no-untyped-def]
    x_RK, y_SRK, new_x_RK, h_RK, post_gains, next_gains, low_RL, down_MLK, rows, rows_a_gain, low_width, eps,
    gain_offset,
    K: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr, POST: tl.constexpr, WEIGHT: tl.constexpr,
    PIECE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """new x = x + y, y normalised first where the architecture does so; h = norm(new x) for what reads it next, and of
    deltas that read it low = A h, PIECE of its numbers a program. Grid: rows, pieces."""
    row, piece = tl.program_id(0), tl.program_id(1)
    pointer: tl.constexpr = tl.pointer_type(WEIGHT)
    k_K = tl.arange(0, BLOCK_K)
    real_K = k_K < K
    next_gain = tl.load(_at(next_gains, row // rows_a_gain, pointer) + k_K, mask=real_K, other=0.0).to(tl.float32)
    if POST:
        gain = tl.load(_at(post_gains, row // rows_a_gain, pointer) + k_K, mask=real_K, other=0.0).to(tl.float32)
    if PIECE > 0:
        l_L = piece * PIECE + tl.arange(0, PIECE)
        line_L = row // rows_a_gain * low_width + l_L
        down_LK = tl.load(down_MLK + line_L[:, None] * K + k_K[None, :], mask=real_K[None, :], other=0.0)
    wait_for_inputs(OVERLAP)
    let_next_begin(OVERLAP)
    y = tl.zeros((BLOCK_K,), tl.float32)
    for split in tl.static_range(SPLITS):
        y += tl.load(y_SRK + (split * rows + row) * K + k_K, mask=real_K, other=0.0).to(tl.float32)
    if POST:
        y = _normed(y, gain + gain_offset, eps, K)
    x = tl.load(x_RK + row * K + k_K, mask=real_K, other=0.0).to(tl.float32) + y.to(WEIGHT).to(tl.float32)
    x = x.to(WEIGHT)
    h = _normed(x.to(tl.float32), next_gain + gain_offset, eps, K).to(WEIGHT)
    mine_K = k_K < tl.where(piece == 0, K, 0)
    tl.store(new_x_RK + row * K + k_K, x, mask=mine_K)
    tl.store(h_RK + row * K + k_K, h, mask=mine_K)
    if PIECE > 0:
        tl.store(low_RL + row * low_width + l_L, tl.sum(down_LK.to(tl.float32) * h.to(tl.float32)[None, :], 1))


@triton.jit
def _normed(x_K, gain_K, eps, K: tl.constexpr):  # type: ignore[no-untyped-def]
    return x_K * tl.rsqrt(tl.sum(x_K * x_K, 0) / K + eps) * gain_K
