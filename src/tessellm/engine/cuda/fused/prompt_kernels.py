"""Kernels of a pass over prompts: many new tokens of each sequence, wherever padding stands among them.

Keys and values are written by one launch and read by the next, so that new tokens see one another as they see cells.
Positions alone say what a token sees: all cells up to its own, within the layer's window.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .kernels import _activate
from .overlap import let_next_begin, wait_for_inputs


@triton.jit
def place_kernel(  # type: ignore[no-untyped-def]
    qkv_SRN, key_cache, value_cache, slot_B, position_BT, cos_CD, sin_CD, turned_RN,
    rows, rows_a_member, tokens, members, junk, cell_stride, head_stride, row_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, ALL_HEADS: tl.constexpr, D: tl.constexpr, IN_SPLITS: tl.constexpr,
    CACHE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Add up the pieces of queries, keys and values; rotate queries and keys; keys and values into their cells, those
    of padding into the junk cell. Grid: rows, member by member. ALL_HEADS: of all three, padded."""
    row = tl.program_id(0)
    half: tl.constexpr = D // 2
    width: tl.constexpr = (HEADS + 2 * KV_HEADS) * D
    member, own = row // rows_a_member, row % rows_a_member
    h_H, n_N = tl.arange(0, half), tl.arange(0, ALL_HEADS)
    position = tl.load(position_BT + own)
    slot = tl.load(slot_B + own // tokens).to(tl.int64)  # large caches have many cells
    turn = tl.maximum(position, 0) * half + h_H
    cos_H, sin_H = tl.load(cos_CD + turn), tl.load(sin_CD + turn)
    wait_for_inputs(OVERLAP)
    let_next_begin(OVERLAP)
    there = (n_N < HEADS + 2 * KV_HEADS)[:, None]
    low, high = tl.zeros((ALL_HEADS, half), tl.float32), tl.zeros((ALL_HEADS, half), tl.float32)
    for part in tl.static_range(IN_SPLITS):
        x = qkv_SRN + (part * rows + row).to(tl.int64) * width + n_N[:, None] * D + h_H[None, :]
        low += tl.load(x, mask=there, other=0.0).to(tl.float32)
        high += tl.load(x + half, mask=there, other=0.0).to(tl.float32)
    low, high = low.to(CACHE).to(tl.float32), high.to(CACHE).to(tl.float32)
    turns = (n_N < HEADS + KV_HEADS)[:, None]  # values do not
    new_low = tl.where(turns, low * cos_H[None, :] - high * sin_H[None, :], low).to(CACHE)
    new_high = tl.where(turns, high * cos_H[None, :] + low * sin_H[None, :], high).to(CACHE)
    y = turned_RN + row.to(tl.int64) * (HEADS * D) + n_N[:, None] * D + h_H[None, :]
    tl.store(y, new_low, mask=(n_N < HEADS)[:, None])
    tl.store(y + half, new_high, mask=(n_N < HEADS)[:, None])
    place = (slot * members + member) * row_stride + tl.where(position >= 0, position, junk) * cell_stride
    cell = place + ((n_N - HEADS) % KV_HEADS)[:, None] * head_stride + h_H[None, :]
    key = ((n_N >= HEADS) & (n_N < HEADS + KV_HEADS))[:, None]
    value = ((n_N >= HEADS + KV_HEADS) & (n_N < HEADS + 2 * KV_HEADS))[:, None]
    tl.store(key_cache + cell, new_low, mask=key)
    tl.store(key_cache + cell + half, new_high, mask=key)
    tl.store(value_cache + cell, new_low, mask=value)
    tl.store(value_cache + cell + half, new_high, mask=value)


@triton.jit
def prompt_attention_kernel(  # type: ignore[no-untyped-def]
    turned_RN, key_cache, value_cache, slot_B, position_BT, found_RN,
    tokens, sequences, members, cell_stride, head_stride, row_stride, window, scale, softcap,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_C: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, CACHE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid: blocks of queries, the last ones first, sequences (member by member), key-value heads.

    A block's queries are those of the heads that share a key-value head, token by token. A query of padding sees
    nothing, and finds zeros.
    """
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # later ones see more cells: they begin first
    sequence, head = tl.program_id(1), tl.program_id(2)
    sharing: tl.constexpr = HEADS // KV_HEADS
    member, own = sequence // sequences, sequence % sequences
    slot = tl.load(slot_B + own).to(tl.int64)
    place = (slot * members + member) * row_stride + head * head_stride
    q_Q, d_D = block * BLOCK_Q + tl.arange(0, BLOCK_Q), tl.arange(0, D)
    t_Q = q_Q // sharing
    wanted_Q = t_Q < tokens
    at_Q = tl.load(position_BT + own * tokens + t_Q, mask=wanted_Q, other=-1)
    stop = tl.max(at_Q, 0) + 1
    first = stop * 0
    if WINDOW:
        first = tl.maximum(0, tl.min(tl.where(at_Q >= 0, at_Q, stop), 0) - window + 1)
    line_Q = ((sequence * tokens + t_Q).to(tl.int64) * HEADS + head * sharing + q_Q % sharing) * D
    wait_for_inputs(OVERLAP)
    let_next_begin(OVERLAP)
    q_QD = tl.load(turned_RN + line_Q[:, None] + d_D[None, :], mask=wanted_Q[:, None], other=0.0)
    top_Q = tl.full((BLOCK_Q,), -float("inf"), tl.float32)
    sum_Q = tl.zeros((BLOCK_Q,), tl.float32)
    found_QD = tl.zeros((BLOCK_Q, D), tl.float32)
    for start in range(first // BLOCK_C * BLOCK_C, stop, BLOCK_C):
        c_C = start + tl.arange(0, BLOCK_C)
        there_C = (c_C >= first) & (c_C < stop)
        cell_CD = place + c_C[:, None] * cell_stride + d_D[None, :]
        k_CD = tl.load(key_cache + cell_CD, mask=there_C[:, None], other=0.0)
        score_QC = tl.dot(q_QD, tl.trans(k_CD), input_precision="ieee") * scale
        if SOFTCAP:
            score_QC = softcap * (2 * tl.sigmoid(2 * score_QC / softcap) - 1)
        seen_QC = (c_C[None, :] <= at_Q[:, None]) & there_C[None, :]
        if WINDOW:
            seen_QC = seen_QC & (c_C[None, :] > at_Q[:, None] - window)
        score_QC = tl.where(seen_QC, score_QC, -float("inf"))
        new_top_Q = tl.maximum(top_Q, tl.max(score_QC, 1))
        safe_Q = tl.where(new_top_Q == -float("inf"), 0.0, new_top_Q)
        keep_Q, weight_QC = tl.exp(top_Q - safe_Q), tl.exp(score_QC - safe_Q[:, None])
        v_CD = tl.load(value_cache + cell_CD, mask=there_C[:, None], other=0.0)
        sum_Q = sum_Q * keep_Q + tl.sum(weight_QC, 1)
        found_QD = found_QD * keep_Q[:, None] + tl.dot(weight_QC.to(CACHE), v_CD, input_precision="ieee")
        top_Q = new_top_Q
    share_Q = 1 / tl.where(sum_Q == 0, 1.0, sum_Q)
    found_QD = found_QD * share_Q[:, None]
    tl.store(found_RN + line_Q[:, None] + d_D[None, :], found_QD.to(CACHE), mask=wanted_Q[:, None])


@triton.jit
def gate_kernel(  # type: ignore[no-untyped-def]
    both_RN, y_RN, low_RL, up_OC, rows, low_width,
    WIDTH: tl.constexpr, MEMBERS: tl.constexpr, RANK: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
    GLU: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """y = act(gate) · up, of gate and up side by side; with deltas (RANK > 0) both and what their own member adds.
    Grid: blocks of a member's rows, blocks of outputs, members."""
    member = tl.program_id(2)
    r_R = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    n_N, l_L = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, max(RANK, 1))
    row_R, real_N = (member * rows + r_R).to(tl.int64), n_N < WIDTH
    there = (r_R < rows)[:, None] & real_N[None, :]
    if RANK > 0:
        own = up_OC + n_N[:, None] * (MEMBERS * RANK) + member * RANK + l_L[None, :]
        gate_NL = tl.load(own, mask=real_N[:, None], other=0.0)
        up_NL = tl.load(own + WIDTH * MEMBERS * RANK, mask=real_N[:, None], other=0.0)
    wait_for_inputs(OVERLAP)
    let_next_begin(OVERLAP)
    both = both_RN + row_R[:, None] * (2 * WIDTH) + n_N[None, :]
    gate = tl.load(both, mask=there, other=0.0).to(tl.float32)
    up = tl.load(both + WIDTH, mask=there, other=0.0).to(tl.float32)
    if RANK > 0:
        low = low_RL + row_R[:, None] * low_width + l_L[None, :]
        real_R = (r_R < rows)[:, None]
        gate += tl.dot(tl.load(low, mask=real_R, other=0.0), tl.trans(gate_NL), input_precision="ieee")
        up += tl.dot(tl.load(low + RANK, mask=real_R, other=0.0), tl.trans(up_NL), input_precision="ieee")
    y = _activate(gate, GLU) * up
    tl.store(y_RN + row_R[:, None] * WIDTH + n_N[None, :], y.to(y_RN.dtype.element_ty), mask=there)
