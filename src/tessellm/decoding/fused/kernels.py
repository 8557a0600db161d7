"""The kernels of a fused decoding step. Weights are found through tables of addresses, so nothing is copied or moved.

Rows are the new tokens, one a slot and member. A table holds the address of every block of BLOCK_N output rows of a
weight, so that layers which read the same input (queries, keys and values; gate and up) are one launch, and so that
the weights of all members are. All sums are in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _at(table, index, pointer: tl.constexpr):  # type: ignore[no-untyped-def]
    """The address in a table, as a pointer to a multiple of 16 bytes: unless that is said, loads are narrow."""
    address = tl.multiple_of(tl.load(table + index), 16)
    return tl.multiple_of(address.to(pointer), 16)


@triton.jit
def _activate(x, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    if kind == 1:  # silu
        return x * tl.sigmoid(x)
    inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)  # gelu, by its tanh form
    return 0.5 * x * (1 + (2 * tl.sigmoid(2 * inner) - 1))


@triton.jit
def linear_kernel(  # type: ignore[no-untyped-def]
    x_GRK, y_GRN, weight_table, up_weight_table, bias_table, low_SRL, delta_table, part_table,
    rows, blocks, out_width, cap, low_width, all_rows, rows_a_member,
    K: tl.constexpr, BLOCK_R: tl.constexpr, TABLE_N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GLU: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr, MEMBERS: tl.constexpr, RANK: tl.constexpr,
    LOW_SPLITS: tl.constexpr, SPLITS: tl.constexpr, WEIGHT: tl.constexpr, PRECISION: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
):  # fmt: skip
    """y = W x [+ deltas] [+ bias], or act(W x) · (W' x), [capped]. Grid: blocks, groups, splits of K.
    Neighbouring programs have the same weights and other blocks of rows, so that those are read from memory once.

    With deltas (MEMBERS > 0) the rows of all members read one weight, and each adds its own up · low.
    With SPLITS > 1 partial sums go to y[split]; who reads them adds them up.
    """
    block, group, split = tl.program_id(0) // ROW_BLOCKS * (BLOCK_N // TABLE_N), tl.program_id(1), tl.program_id(2)
    row_R = tl.program_id(0) % ROW_BLOCKS * BLOCK_R + tl.arange(0, BLOCK_R)
    n_N = tl.arange(0, BLOCK_N)
    real_R = row_R < rows
    pointer: tl.constexpr = tl.pointer_type(WEIGHT)
    weight = _at(weight_table, group * blocks + block, pointer)
    x = x_GRK + (group * rows + row_R[:, None]) * K
    total_RN = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    up_RN = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    if GLU > 0:
        up_weight = _at(up_weight_table, group * blocks + block, pointer)
    span: tl.constexpr = (K + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K) * BLOCK_K  # whole blocks: loads stay aligned
    for start in range(0, span, BLOCK_K):
        k_K = split * span + start + tl.arange(0, BLOCK_K)
        real_K = k_K < K
        x_RK = tl.load(x + k_K[None, :], mask=real_R[:, None] & real_K[None, :], other=0.0)
        w_NK = tl.load(weight + n_N[:, None] * K + k_K[None, :], mask=real_K[None, :], other=0.0)
        total_RN += tl.dot(x_RK.to(w_NK.dtype), tl.trans(w_NK), input_precision=PRECISION)
        if GLU > 0:
            u_NK = tl.load(up_weight + n_N[:, None] * K + k_K[None, :], mask=real_K[None, :], other=0.0)
            up_RN += tl.dot(x_RK.to(u_NK.dtype), tl.trans(u_NK), input_precision=PRECISION)
    if MEMBERS > 0 and split == 0:
        total_RN += _deltas(delta_table, low_SRL, part_table, block, blocks, 0, row_R, n_N, rows, low_width, all_rows,
                            rows_a_member, MEMBERS, RANK, LOW_SPLITS, BLOCK_N, pointer, PRECISION)  # fmt: skip
        if GLU > 0:
            up_RN += _deltas(delta_table, low_SRL, part_table, block, blocks, 1, row_R, n_N, rows, low_width, all_rows,
                             rows_a_member, MEMBERS, RANK, LOW_SPLITS, BLOCK_N, pointer, PRECISION)  # fmt: skip
    _finish(y_GRN, total_RN, up_RN, bias_table, group, block, blocks, split, row_R, n_N, rows, out_width, cap,
            TABLE_N, GLU, BIAS, CAP, SPLITS, pointer)  # fmt: skip


@triton.jit
def _deltas(  # type: ignore[no-untyped-def]
    delta_table, low_SRL, part_table, block, blocks, which, row_R, n_N, rows, low_width, all_rows, rows_a_member,
    MEMBERS: tl.constexpr, RANK: tl.constexpr, LOW_SPLITS: tl.constexpr, BLOCK_N: tl.constexpr, pointer: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """up · low of every row's own member; `which` of two layers where gate and up are one launch."""
    r_L = tl.arange(0, RANK)
    part = tl.load(part_table + which * blocks + block)
    low_RL = tl.zeros((row_R.shape[0], RANK), tl.float32)
    for s in range(LOW_SPLITS):
        place = (s * all_rows + row_R[:, None]) * low_width + part * RANK + r_L[None, :]
        low_RL += tl.load(low_SRL + place, mask=(row_R < rows)[:, None], other=0.0)
    found_RN = tl.zeros((row_R.shape[0], BLOCK_N), tl.float32)
    for member in range(MEMBERS):
        address = tl.load(delta_table + (which * MEMBERS + member) * blocks + block)
        up = tl.multiple_of(address.to(pointer), 16)
        given_NL = n_N[:, None] + r_L[None, :] < tl.where(address != 0, BLOCK_N + RANK, 0)
        up_NL = tl.load(up + n_N[:, None] * RANK + r_L[None, :], mask=given_NL, other=0.0)
        own_R = (row_R // rows_a_member) == member
        own_RL = tl.where(own_R[:, None], low_RL, 0.0).to(up_NL.dtype)
        found_RN += tl.dot(own_RL, tl.trans(up_NL), input_precision=PRECISION)
    return found_RN


@triton.jit
def thin_kernel(  # type: ignore[no-untyped-def]
    x_GRK, y_GRN, weight_table, up_weight_table, bias_table, rows, blocks, out_width, cap,
    K: tl.constexpr, BLOCK_R: tl.constexpr, TABLE_N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GLU: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr, SPLITS: tl.constexpr, WEIGHT: tl.constexpr,
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
        x_RK = tl.load(x + k_K[None, :], mask=real_R[:, None] & real_K[None, :], other=0.0).to(tl.float32)
        sum_RNK += x_RK[:, None, :] * w_NK.to(tl.float32)[None, :, :]
        if GLU > 0:
            up_RNK += x_RK[:, None, :] * u_NK.to(tl.float32)[None, :, :]
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
    """Bias, activation and cap on the sums of a block, and the block into y."""
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
    tl.store(y_GRN + place, total_RN.to(y_GRN.dtype.element_ty), mask=(row_R < rows)[:, None])


@triton.jit
def embed_kernel(  # type: ignore[no-untyped-def]
    token_MB, table_M, gain_table, x_RK, h_RK, slots, scale, rows_a_gain, eps, gain_offset,
    K: tl.constexpr, BLOCK_K: tl.constexpr, WEIGHT: tl.constexpr,
):  # fmt: skip
    """x = scale · E[token], h = norm(x). Grid: slots, members."""
    slot, member = tl.program_id(0), tl.program_id(1)
    pointer: tl.constexpr = tl.pointer_type(WEIGHT)
    row = member * slots + slot
    k_K = tl.arange(0, BLOCK_K)
    token = tl.load(token_MB + row)
    x = tl.load(_at(table_M, member, pointer) + token * K + k_K, mask=k_K < K, other=0.0)
    x = (x * scale).to(WEIGHT)
    tl.store(x_RK + row * K + k_K, x, mask=k_K < K)
    _store_normed(h_RK, x.to(tl.float32), gain_table, row, rows_a_gain, k_K, eps, gain_offset, K, WEIGHT)


@triton.jit
def residual_kernel(  # type: ignore[no-untyped-def]
    x_RK, y_SRK, h_RK, post_gains, next_gains, rows, rows_a_gain, eps, gain_offset,
    K: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr, POST: tl.constexpr, WEIGHT: tl.constexpr,
):  # fmt: skip
    """x += y, normalised first where the architecture does so; h = norm(x) for what reads it next. Grid: rows."""
    row = tl.program_id(0)
    pointer: tl.constexpr = tl.pointer_type(WEIGHT)
    k_K = tl.arange(0, BLOCK_K)
    real_K = k_K < K
    y = tl.zeros((BLOCK_K,), tl.float32)
    for split in tl.static_range(SPLITS):
        y += tl.load(y_SRK + (split * rows + row) * K + k_K, mask=real_K, other=0.0).to(tl.float32)
    if POST:
        gain = tl.load(_at(post_gains, row // rows_a_gain, pointer) + k_K, mask=real_K, other=0.0).to(tl.float32)
        y = y * tl.rsqrt(tl.sum(y * y, 0) / K + eps) * (gain + gain_offset)
    x = tl.load(x_RK + row * K + k_K, mask=real_K, other=0.0).to(tl.float32) + y.to(WEIGHT).to(tl.float32)
    x = x.to(WEIGHT)
    tl.store(x_RK + row * K + k_K, x, mask=real_K)
    _store_normed(h_RK, x.to(tl.float32), next_gains, row, rows_a_gain, k_K, eps, gain_offset, K, WEIGHT)


@triton.jit
def _store_normed(  # type: ignore[no-untyped-def]
    h_RK, x_K, gain_table, row, rows_a_gain, k_K, eps, gain_offset, K: tl.constexpr, WEIGHT: tl.constexpr
):  # fmt: skip
    pointer: tl.constexpr = tl.pointer_type(WEIGHT)
    gain = tl.load(_at(gain_table, row // rows_a_gain, pointer) + k_K, mask=k_K < K, other=0.0).to(tl.float32)
    normed = x_K * tl.rsqrt(tl.sum(x_K * x_K, 0) / K + eps)
    tl.store(h_RK + row * K + k_K, (normed * (gain + gain_offset)).to(WEIGHT), mask=k_K < K)
