"""Attend from one new token or a few: rotate, write the cache, read it, in one launch; another where cells are split,
and one before where new tokens are many (place_kernel rotates them and writes the cache)."""

from __future__ import annotations

import triton
import triton.language as tl

from .overlap import let_next_begin, wait_for_inputs


@triton.jit
def attention_kernel(  # type: ignore[no-untyped-def]
    qkv_SRN, key_cache, value_cache, position_BT, cos_CD, sin_CD, found_RN, part_max, part_sum, part_found,
    rows, slots, members, junk, cell_stride, head_stride, row_stride, window, scale, softcap, cells_a_split,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_C: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, SPLITS: tl.constexpr, TOKENS: tl.constexpr, QUERIES: tl.constexpr, CACHE: tl.constexpr,
    IN_SPLITS: tl.constexpr, PLACED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid: sequences (member-major), key-value heads, splits of the cells.

    A program has all new tokens of its sequence: real ones first, at positions that follow one another, then padding at
    position −1. Its queries are those of the heads that share a key-value head, token by token, padded to QUERIES.
    PLACED: the new tokens' keys and values are in their cells already, which are read as all others are, and instead of
    `qkv_SRN` there are queries alone, rotated: [rows, HEADS · D]. Padding sees nothing then, and finds zeros.
    """
    sequence, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    half: tl.constexpr = D // 2
    sharing: tl.constexpr = HEADS // KV_HEADS
    width: tl.constexpr = (HEADS + 2 * KV_HEADS) * D
    slot, member = sequence % slots, sequence // slots
    place = (slot.to(tl.int64) * members + member) * row_stride + head * head_stride  # large caches have many cells
    past = tl.load(position_BT + slot * TOKENS)  # cells before the first new token: earlier passes wrote them
    first = 0
    if WINDOW:
        first = tl.maximum(0, past - window + 1)
    begin = tl.maximum(split * cells_a_split, first // BLOCK_C * BLOCK_C)
    h_H = tl.arange(0, half)
    q_Q = tl.arange(0, QUERIES)
    t_Q, wanted_Q = q_Q // sharing, q_Q < TOKENS * sharing
    at_Q = tl.load(position_BT + slot * TOKENS + t_Q, mask=wanted_Q, other=-1)
    wanted = wanted_Q[:, None]
    if PLACED:
        stop = tl.minimum((split + 1) * cells_a_split, tl.max(at_Q, 0) + 1)
        line_Q = ((sequence * TOKENS + t_Q) * HEADS + head * sharing + q_Q % sharing) * D
        wait_for_inputs(OVERLAP)
        let_next_begin(OVERLAP)
        q = qkv_SRN + line_Q[:, None] + h_H[None, :]
        low_q, high_q = tl.load(q, mask=wanted, other=0.0), tl.load(q + half, mask=wanted, other=0.0)
    else:
        stop = tl.minimum((split + 1) * cells_a_split, past)
        turn_Q = tl.maximum(at_Q, 0)
        cos_QH = tl.load(cos_CD + turn_Q[:, None] * half + h_H[None, :])
        sin_QH = tl.load(sin_CD + turn_Q[:, None] * half + h_H[None, :])
        wait_for_inputs(OVERLAP)
        let_next_begin(OVERLAP)
        line_Q = (sequence * TOKENS + t_Q) * width + (head * sharing + q_Q % sharing) * D
        q1 = tl.zeros((QUERIES, half), tl.float32)
        q2 = tl.zeros((QUERIES, half), tl.float32)
        for part in tl.static_range(IN_SPLITS):
            q = qkv_SRN + part * rows * width + line_Q[:, None] + h_H[None, :]
            q1 += tl.load(q, mask=wanted, other=0.0).to(tl.float32)
            q2 += tl.load(q + half, mask=wanted, other=0.0).to(tl.float32)
        q1, q2 = q1.to(CACHE).to(tl.float32), q2.to(CACHE).to(tl.float32)
        low_q = (q1 * cos_QH - q2 * sin_QH).to(CACHE)
        high_q = (q2 * cos_QH + q1 * sin_QH).to(CACHE)

    top_Q = tl.full((QUERIES,), -float("inf"), tl.float32)
    sum_Q = tl.zeros((QUERIES,), tl.float32)
    low_found = tl.zeros((QUERIES, half), tl.float32)
    high_found = tl.zeros((QUERIES, half), tl.float32)
    if not PLACED and split == 0:  # the new tokens, from registers: what was just written may not be read back here
        for t in tl.range(TOKENS, num_stages=1):
            position = tl.load(position_BT + slot * TOKENS + t)
            turn = tl.maximum(position, 0) * half + h_H
            cos, sin = tl.load(cos_CD + turn), tl.load(sin_CD + turn)
            k = (sequence * TOKENS + t) * width + (HEADS + head) * D + h_H
            k1, k2 = tl.zeros((half,), tl.float32), tl.zeros((half,), tl.float32)
            v1, v2 = tl.zeros((half,), tl.float32), tl.zeros((half,), tl.float32)
            for part in tl.static_range(IN_SPLITS):
                new = qkv_SRN + part * rows * width + k
                k1 += tl.load(new).to(tl.float32)
                k2 += tl.load(new + half).to(tl.float32)
                v1 += tl.load(new + KV_HEADS * D).to(tl.float32)
                v2 += tl.load(new + KV_HEADS * D + half).to(tl.float32)
            k1, k2 = k1.to(CACHE).to(tl.float32), k2.to(CACHE).to(tl.float32)
            low_k, high_k = (k1 * cos - k2 * sin).to(CACHE), (k2 * cos + k1 * sin).to(CACHE)
            own = place + tl.where(position >= 0, position, junk) * cell_stride + h_H
            tl.store(key_cache + own, low_k)
            tl.store(key_cache + own + half, high_k)
            tl.store(value_cache + own, v1.to(CACHE))
            tl.store(value_cache + own + half, v2.to(CACHE))
            wide_Q = tl.sum(low_q.to(tl.float32) * low_k.to(tl.float32)[None, :], 1)
            score_Q = (wide_Q + tl.sum(high_q.to(tl.float32) * high_k.to(tl.float32)[None, :], 1)) * scale
            if SOFTCAP:
                score_Q = softcap * (2 * tl.sigmoid(2 * score_Q / softcap) - 1)
            if TOKENS > 1:  # itself and those before it; padding has nobody but itself
                seen_Q = (t_Q >= t) & ((t_Q == t) | (position >= 0))
                if WINDOW:
                    seen_Q = seen_Q & (t_Q - t < window)
                score_Q = tl.where(seen_Q, score_Q, -float("inf"))
            new_top_Q = tl.maximum(top_Q, score_Q)
            safe_Q = tl.where(new_top_Q == -float("inf"), 0.0, new_top_Q)
            keep_Q, weight_Q = tl.exp(top_Q - safe_Q), tl.exp(score_Q - safe_Q)
            sum_Q = sum_Q * keep_Q + weight_Q
            low_v = weight_Q[:, None] * v1.to(CACHE).to(tl.float32)[None, :]
            high_v = weight_Q[:, None] * v2.to(CACHE).to(tl.float32)[None, :]
            if TOKENS > 1:  # a draft that a member cannot read is NaN, and so is zero times it
                low_v, high_v = tl.where(seen_Q[:, None], low_v, 0.0), tl.where(seen_Q[:, None], high_v, 0.0)
            low_found, high_found = low_found * keep_Q[:, None] + low_v, high_found * keep_Q[:, None] + high_v
            top_Q = new_top_Q

    for start in range(begin, stop, BLOCK_C):
        c_C = start + tl.arange(0, BLOCK_C)
        seen_C = (c_C >= first) & (c_C < stop)  # a split need not be whole blocks
        cell = place + c_C[:, None] * cell_stride + h_H[None, :]
        k1_CH = tl.load(key_cache + cell, mask=seen_C[:, None], other=0.0)
        k2_CH = tl.load(key_cache + cell + half, mask=seen_C[:, None], other=0.0)
        score_QC = tl.dot(low_q, tl.trans(k1_CH), input_precision="ieee")
        score_QC = (score_QC + tl.dot(high_q, tl.trans(k2_CH), input_precision="ieee")) * scale
        if SOFTCAP:
            score_QC = softcap * (2 * tl.sigmoid(2 * score_QC / softcap) - 1)
        seen_QC = seen_C[None, :]
        if PLACED:
            seen_QC = seen_QC & (c_C[None, :] <= at_Q[:, None])
        if WINDOW and TOKENS > 1:  # later tokens see fewer of them
            seen_QC = seen_QC & (c_C[None, :] > past + t_Q[:, None] - window)
        score_QC = tl.where(seen_QC, score_QC, -float("inf"))
        new_top_Q = tl.maximum(top_Q, tl.max(score_QC, 1))
        safe_Q = tl.where(new_top_Q == -float("inf"), 0.0, new_top_Q)
        keep_Q = tl.exp(top_Q - safe_Q)
        weight_QC = tl.exp(score_QC - safe_Q[:, None])
        v1_CH = tl.load(value_cache + cell, mask=seen_C[:, None], other=0.0)
        v2_CH = tl.load(value_cache + cell + half, mask=seen_C[:, None], other=0.0)
        sum_Q = sum_Q * keep_Q + tl.sum(weight_QC, 1)
        low_found = low_found * keep_Q[:, None] + tl.dot(weight_QC.to(CACHE), v1_CH, input_precision="ieee")
        high_found = high_found * keep_Q[:, None] + tl.dot(weight_QC.to(CACHE), v2_CH, input_precision="ieee")
        top_Q = new_top_Q

    if SPLITS == 1:
        share_Q = 1 / tl.where(sum_Q == 0, 1.0, sum_Q)
        y_Q = (sequence * TOKENS + t_Q) * HEADS * D + (head * sharing + q_Q % sharing) * D
        y = found_RN + y_Q[:, None] + h_H[None, :]
        tl.store(y, (low_found * share_Q[:, None]).to(CACHE), mask=wanted)
        tl.store(y + half, (high_found * share_Q[:, None]).to(CACHE), mask=wanted)
    else:
        index_Q = ((sequence * KV_HEADS + head) * SPLITS + split) * QUERIES + q_Q
        tl.store(part_max + index_Q, top_Q)
        tl.store(part_sum + index_Q, sum_Q)
        tl.store(part_found + index_Q[:, None] * D + h_H[None, :], low_found)
        tl.store(part_found + index_Q[:, None] * D + half + h_H[None, :], high_found)


@triton.jit
def combine_kernel(  # type: ignore[no-untyped-def]
    part_max, part_sum, part_found, found_RN, low_SRL, down_CK, rows, rows_a_member,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, PADDED_SPLITS: tl.constexpr,
    TOKENS: tl.constexpr, QUERIES: tl.constexpr, CACHE: tl.constexpr, RANK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The splits' parts into one; where deltas read it (RANK > 0), a head's part of their low. Grid: rows, heads."""
    row, head = tl.program_id(0), tl.program_id(1)
    sharing: tl.constexpr = HEADS // KV_HEADS
    d_D = tl.arange(0, D)
    if RANK > 0:
        r_L = tl.arange(0, RANK)
        line_L = row // rows_a_member * RANK + r_L
        down_LD = tl.load(down_CK + line_L[:, None] * (HEADS * D) + head * D + d_D[None, :])
    wait_for_inputs(OVERLAP)
    let_next_begin(OVERLAP)
    query = row % TOKENS * sharing + head % sharing
    s_S = tl.arange(0, PADDED_SPLITS)
    index_S = ((row // TOKENS * KV_HEADS + head // sharing) * SPLITS + s_S) * QUERIES + query
    top_S = tl.load(part_max + index_S, mask=s_S < SPLITS, other=-float("inf"))
    top = tl.max(top_S, 0)
    weight_S = tl.exp(top_S - tl.where(top == -float("inf"), 0.0, top))
    sum_S = tl.load(part_sum + index_S, mask=s_S < SPLITS, other=0.0)
    found_SD = tl.load(part_found + index_S[:, None] * D + d_D[None, :], mask=(s_S < SPLITS)[:, None], other=0.0)
    total = tl.sum(sum_S * weight_S, 0)
    found_D = (tl.sum(found_SD * weight_S[:, None], 0) / tl.where(total == 0, 1.0, total)).to(CACHE)
    tl.store(found_RN + (row * HEADS + head) * D + d_D, found_D)
    if RANK > 0:
        low_L = tl.sum(down_LD.to(tl.float32) * found_D.to(tl.float32)[None, :], 1)
        tl.store(low_SRL + (head * rows + row) * RANK + r_L, low_L)
