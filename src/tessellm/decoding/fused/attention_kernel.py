"""One new token's attention: rotate, write the cache, read it, in one launch; a second one where cells are split."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def attention_kernel(  # type: ignore[no-untyped-def]
    qkv_SRN, key_cache, value_cache, position_B, cos_CD, sin_CD, found_RN, part_max, part_sum, part_found,
    rows, slots, members, junk, cell_stride, head_stride, row_stride, window, scale, softcap, cells_a_split,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_C: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, SPLITS: tl.constexpr, GROUP: tl.constexpr, CACHE: tl.constexpr, IN_SPLITS: tl.constexpr,
):  # fmt: skip
    """Grid: rows (member-major), key-value heads, splits of the cells. GROUP: queries a head, padded."""
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    half: tl.constexpr = D // 2
    queries: tl.constexpr = HEADS // KV_HEADS
    slot, member = row % slots, row // slots
    position = tl.load(position_B + slot)
    real = position >= 0
    cell = tl.where(real, position, junk)
    at = tl.maximum(position, 0)
    h_H = tl.arange(0, half)
    g_G = tl.arange(0, GROUP)
    cos = tl.load(cos_CD + at * half + h_H)
    sin = tl.load(sin_CD + at * half + h_H)

    width: tl.constexpr = (HEADS + 2 * KV_HEADS) * D
    line = row * width
    q = line + (head * queries + g_G[:, None]) * D + h_H[None, :]
    wanted = (g_G < queries)[:, None]
    k = line + (HEADS + head) * D + h_H
    v = line + (HEADS + KV_HEADS + head) * D + h_H
    q1 = tl.zeros((GROUP, half), tl.float32)
    q2 = tl.zeros((GROUP, half), tl.float32)
    k1, k2 = tl.zeros((half,), tl.float32), tl.zeros((half,), tl.float32)
    v1, v2 = tl.zeros((half,), tl.float32), tl.zeros((half,), tl.float32)
    for part in tl.static_range(IN_SPLITS):
        base = qkv_SRN + part * rows * width
        q1 += tl.load(base + q, mask=wanted, other=0.0).to(tl.float32)
        q2 += tl.load(base + q + half, mask=wanted, other=0.0).to(tl.float32)
        k1 += tl.load(base + k).to(tl.float32)
        k2 += tl.load(base + k + half).to(tl.float32)
        v1 += tl.load(base + v).to(tl.float32)
        v2 += tl.load(base + v + half).to(tl.float32)
    q1, q2 = q1.to(CACHE).to(tl.float32), q2.to(CACHE).to(tl.float32)
    k1, k2 = k1.to(CACHE).to(tl.float32), k2.to(CACHE).to(tl.float32)
    v1, v2 = v1.to(CACHE), v2.to(CACHE)
    low_q = (q1 * cos[None, :] - q2 * sin[None, :]).to(CACHE)
    high_q = (q2 * cos[None, :] + q1 * sin[None, :]).to(CACHE)

    low_k = (k1 * cos - k2 * sin).to(CACHE)
    high_k = (k2 * cos + k1 * sin).to(CACHE)

    place = (slot * members + member) * row_stride + head * head_stride
    own = place + cell * cell_stride + h_H
    if split == 0:
        tl.store(key_cache + own, low_k)
        tl.store(key_cache + own + half, high_k)
        tl.store(value_cache + own, v1)
        tl.store(value_cache + own + half, v2)

    top_G = tl.full((GROUP,), -float("inf"), tl.float32)
    sum_G = tl.zeros((GROUP,), tl.float32)
    low_found = tl.zeros((GROUP, half), tl.float32)
    high_found = tl.zeros((GROUP, half), tl.float32)
    if split == 0:  # the token itself, from registers: what was just written may not be read back here
        wide_G = tl.sum(low_q.to(tl.float32) * low_k.to(tl.float32)[None, :], 1)
        score_G = (wide_G + tl.sum(high_q.to(tl.float32) * high_k.to(tl.float32)[None, :], 1)) * scale
        if SOFTCAP:
            score_G = softcap * (2 * tl.sigmoid(2 * score_G / softcap) - 1)
        top_G = score_G
        sum_G = tl.full((GROUP,), 1.0, tl.float32)
        low_found += v1.to(tl.float32)[None, :]
        high_found += v2.to(tl.float32)[None, :]

    first = 0
    if WINDOW:
        first = tl.maximum(0, position - window + 1)
    begin = tl.maximum(split * cells_a_split, first // BLOCK_C * BLOCK_C)
    stop = tl.minimum((split + 1) * cells_a_split, position)
    for start in range(begin, stop, BLOCK_C):
        c_C = start + tl.arange(0, BLOCK_C)
        seen_C = (c_C >= first) & (c_C < position)
        past = place + c_C[:, None] * cell_stride + h_H[None, :]
        k1_CH = tl.load(key_cache + past, mask=seen_C[:, None], other=0.0)
        k2_CH = tl.load(key_cache + past + half, mask=seen_C[:, None], other=0.0)
        score_GC = tl.dot(low_q, tl.trans(k1_CH), input_precision="ieee")
        score_GC = (score_GC + tl.dot(high_q, tl.trans(k2_CH), input_precision="ieee")) * scale
        if SOFTCAP:
            score_GC = softcap * (2 * tl.sigmoid(2 * score_GC / softcap) - 1)
        score_GC = tl.where(seen_C[None, :], score_GC, -float("inf"))
        new_top_G = tl.maximum(top_G, tl.max(score_GC, 1))
        safe_G = tl.where(new_top_G == -float("inf"), 0.0, new_top_G)
        keep_G = tl.exp(top_G - safe_G)
        weight_GC = tl.exp(score_GC - safe_G[:, None])
        v1_CH = tl.load(value_cache + past, mask=seen_C[:, None], other=0.0)
        v2_CH = tl.load(value_cache + past + half, mask=seen_C[:, None], other=0.0)
        sum_G = sum_G * keep_G + tl.sum(weight_GC, 1)
        low_found = low_found * keep_G[:, None] + tl.dot(weight_GC.to(CACHE), v1_CH, input_precision="ieee")
        high_found = high_found * keep_G[:, None] + tl.dot(weight_GC.to(CACHE), v2_CH, input_precision="ieee")
        top_G = new_top_G

    if SPLITS == 1:
        share_G = 1 / sum_G
        y = found_RN + row * HEADS * D + (head * queries + g_G[:, None]) * D + h_H[None, :]
        tl.store(y, (low_found * share_G[:, None]).to(CACHE), mask=wanted)
        tl.store(y + half, (high_found * share_G[:, None]).to(CACHE), mask=wanted)
    else:
        index = ((row * KV_HEADS + head) * SPLITS + split) * GROUP + g_G
        tl.store(part_max + index, top_G)
        tl.store(part_sum + index, sum_G)
        tl.store(part_found + index[:, None] * D + h_H[None, :], low_found)
        tl.store(part_found + index[:, None] * D + half + h_H[None, :], high_found)


@triton.jit
def combine_kernel(  # type: ignore[no-untyped-def]
    part_max, part_sum, part_found, found_RN, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr,
    SPLITS: tl.constexpr, PADDED_SPLITS: tl.constexpr, GROUP: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """The splits' parts into one. Grid: rows, heads."""
    row, head = tl.program_id(0), tl.program_id(1)
    queries: tl.constexpr = HEADS // KV_HEADS
    s_S = tl.arange(0, PADDED_SPLITS)
    index_S = ((row * KV_HEADS + head // queries) * SPLITS + s_S) * GROUP + head % queries
    top_S = tl.load(part_max + index_S, mask=s_S < SPLITS, other=-float("inf"))
    weight_S = tl.exp(top_S - tl.max(top_S, 0))
    sum_S = tl.load(part_sum + index_S, mask=s_S < SPLITS, other=0.0)
    d_D = tl.arange(0, D)
    found_SD = tl.load(part_found + index_S[:, None] * D + d_D[None, :], mask=(s_S < SPLITS)[:, None], other=0.0)
    found_D = tl.sum(found_SD * weight_S[:, None], 0) / tl.sum(sum_S * weight_S, 0)
    tl.store(found_RN + (row * HEADS + head) * D + d_D, found_D.to(CACHE))
