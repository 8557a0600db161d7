"""Mixing over whole vocabularies as Triton kernels: members' logits are read three times, and nothing as large as they
are is written unless the distribution is wanted.

    part_kernel      the largest logit of each member, and the sum of exponentials, per piece of a row
    sums_kernel      each member's log of that sum; the sum of the product, per piece
    mixture_kernel   the likeliest token of Σ π_c p_c per piece; also log p̂ itself, where that is wanted
    best_kernel      the likeliest token of whole rows
    loglik_kernel    what each component gave a token

Components are every member, and a product in which member m counts count_Bm times. One without a share of π is left
out, whatever it computes. Logits that are −∞ are impossible tokens. A member with NaN or +∞ in a row has NaN
throughout, as by `log_softmax`.

Shapes: M members, padded to MP; B rows; P pieces of a row; L = M + 1 components; V vocabulary.
"""

from __future__ import annotations

import triton
import triton.language as tl

COUNTS = ["rows", "blocks"]  # numbers of which no kernel is compiled anew


@triton.jit
def _exp(x, top):  # type: ignore[no-untyped-def]
    """e^(x − top); 0 where x is −∞, also where top is."""
    return tl.where(x == float("-inf"), 0.0, tl.exp(x - top))


@triton.jit(do_not_specialize=COUNTS)
def part_kernel(  # type: ignore[no-untyped-def]
    x_MBV, max_MBP, sum_MBP, V, rows, blocks, stride_m, stride_b,
    P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: rows, members, pieces."""
    row, member, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    x = x_MBV + member.to(tl.int64) * stride_m + row.to(tl.int64) * stride_b
    top_N = tl.full((BLOCK,), float("-inf"), tl.float32)
    sum_N = tl.zeros((BLOCK,), tl.float32)
    for start in range(piece * blocks * BLOCK, tl.minimum((piece + 1) * blocks * BLOCK, V), BLOCK):
        v_N = start + tl.arange(0, BLOCK)
        x_N = tl.load(x + v_N, mask=v_N < V, other=float("-inf")).to(tl.float32)
        new_N = tl.maximum(top_N, x_N)
        sum_N = sum_N * _exp(top_N, new_N) + _exp(x_N, new_N)
        top_N = new_N
    top = tl.max(top_N, 0)
    place = (member * rows + row) * P + piece
    tl.store(max_MBP + place, top)
    tl.store(sum_MBP + place, tl.sum(sum_N * _exp(top_N, top), 0))


@triton.jit
def _member_sums(max_MBP, sum_MBP, row, rows, m_M, MEMBERS: tl.constexpr, P: tl.constexpr):  # type: ignore[no-untyped-def]
    """The log of each member's sum of exponentials: [MP]; NaN where nothing is possible, as by a softmax."""
    place_MP = (m_M[:, None] * rows + row) * P + tl.arange(0, P)[None, :]
    real_M1 = m_M[:, None] < MEMBERS
    max_MP = tl.load(max_MBP + place_MP, mask=real_M1, other=0.0)
    sum_MP = tl.load(sum_MBP + place_MP, mask=real_M1, other=1.0)
    top_M = tl.max(max_MP, 1)
    lse_M = top_M + tl.log(tl.sum(sum_MP * _exp(max_MP, top_M[:, None]), 1))
    return tl.where(top_M == float("-inf"), float("nan"), lse_M)


@triton.jit
def _score(logp_MN, count_M1, FLOOR: tl.constexpr):  # type: ignore[no-untyped-def]
    """The product before it is normalised: [N]. A member that counts zero has no say."""
    floored_MN = tl.where(count_M1 > 0, logp_MN, tl.maximum(logp_MN, FLOOR))
    return tl.sum(tl.where(count_M1 == 0, 0.0, count_M1 * floored_MN), 0)


@triton.jit(do_not_specialize=COUNTS)
def sums_kernel(  # type: ignore[no-untyped-def]
    x_MBV, max_MBP, sum_MBP, count_BM, lse_BM, max_BP, sum_BP, V, rows, blocks, stride_m, stride_b,
    MEMBERS: tl.constexpr, MP: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, FLOOR: tl.constexpr,
):  # fmt: skip
    """Grid: rows, pieces."""
    row, piece = tl.program_id(0), tl.program_id(1)
    m_M = tl.arange(0, MP)
    lse_M = _member_sums(max_MBP, sum_MBP, row, rows, m_M, MEMBERS, P)
    if piece == 0:
        tl.store(lse_BM + row * MEMBERS + m_M, lse_M, mask=m_M < MEMBERS)
    count_M1 = tl.load(count_BM + row * MEMBERS + m_M, mask=m_M < MEMBERS, other=0.0)[:, None]
    x_M1 = x_MBV + m_M[:, None].to(tl.int64) * stride_m + row.to(tl.int64) * stride_b
    top_N = tl.full((BLOCK,), float("-inf"), tl.float32)
    sum_N = tl.zeros((BLOCK,), tl.float32)
    for start in range(piece * blocks * BLOCK, tl.minimum((piece + 1) * blocks * BLOCK, V), BLOCK):
        v_N = start + tl.arange(0, BLOCK)
        real_MN = (m_M[:, None] < MEMBERS) & (v_N < V)[None, :]
        logp_MN = tl.load(x_M1 + v_N[None, :], mask=real_MN, other=float("-inf")).to(tl.float32) - lse_M[:, None]
        score_N = tl.where(v_N < V, _score(logp_MN, count_M1, FLOOR), float("-inf"))
        new_N = tl.maximum(top_N, score_N)
        sum_N = sum_N * _exp(top_N, new_N) + _exp(score_N, new_N)
        top_N = new_N
    top = tl.max(top_N, 0)
    tl.store(max_BP + row * P + piece, top)
    tl.store(sum_BP + row * P + piece, tl.sum(sum_N * _exp(top_N, top), 0))


@triton.jit
def _product_sum(max_BP, sum_BP, row, P: tl.constexpr):  # type: ignore[no-untyped-def]
    """The log of the product's sum over a row; −∞ where nothing is possible."""
    p_P = row * P + tl.arange(0, P)
    max_P, sum_P = tl.load(max_BP + p_P), tl.load(sum_BP + p_P)
    top = tl.max(max_P, 0)
    return top + tl.log(tl.sum(sum_P * _exp(max_P, top), 0))


@triton.jit
def _product_logp(score, base_logp, total):  # type: ignore[no-untyped-def]
    """The product's distribution; where nothing is possible by it, the base's."""
    return tl.where(total == float("-inf"), base_logp, score - total)


@triton.jit(do_not_specialize=COUNTS)
def mixture_kernel(  # type: ignore[no-untyped-def]
    x_MBV, lse_BM, count_BM, max_BP, sum_BP, log_pi_BL, best_BP, token_BP, logp_BV, V, blocks, stride_m, stride_b,
    MEMBERS: tl.constexpr, MP: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, FLOOR: tl.constexpr,
    TINY: tl.constexpr, WRITE: tl.constexpr,
):  # fmt: skip
    """Grid: rows, pieces."""
    row, piece = tl.program_id(0), tl.program_id(1)
    m_M = tl.arange(0, MP)
    real_M = m_M < MEMBERS
    lse_M = tl.load(lse_BM + row * MEMBERS + m_M, mask=real_M, other=0.0)
    count_M1 = tl.load(count_BM + row * MEMBERS + m_M, mask=real_M, other=0.0)[:, None]
    total = _product_sum(max_BP, sum_BP, row, P)
    log_pi = log_pi_BL + row * (MEMBERS + 1)
    weight_M1 = tl.exp(tl.load(log_pi + m_M, mask=real_M, other=float("-inf")))[:, None]
    weight = tl.exp(tl.load(log_pi + MEMBERS))
    x_M1 = x_MBV + m_M[:, None].to(tl.int64) * stride_m + row.to(tl.int64) * stride_b
    best_N = tl.full((BLOCK,), -1.0, tl.float32)
    token_N = tl.zeros((BLOCK,), tl.int32)
    for start in range(piece * blocks * BLOCK, tl.minimum((piece + 1) * blocks * BLOCK, V), BLOCK):
        v_N = start + tl.arange(0, BLOCK)
        real_MN = real_M[:, None] & (v_N < V)[None, :]
        logp_MN = tl.load(x_M1 + v_N[None, :], mask=real_MN, other=float("-inf")).to(tl.float32) - lse_M[:, None]
        base_N = tl.sum(tl.where(m_M[:, None] == 0, logp_MN, 0.0), 0)
        product_N = _product_logp(_score(logp_MN, count_M1, FLOOR), base_N, total)
        prob_N = tl.sum(tl.where(weight_M1 > 0, weight_M1 * _exp(logp_MN, 0.0), 0.0), 0)
        prob_N += tl.where(weight > 0, weight * _exp(product_N, 0.0), 0.0)
        if WRITE:
            log_M1 = tl.load(log_pi + m_M, mask=real_M, other=float("-inf"))[:, None]
            small_N = tl.max(tl.where(weight_M1 > 0, log_M1 + logp_MN, float("-inf")), 0)
            small_N = tl.maximum(small_N, tl.where(weight > 0, tl.load(log_pi + MEMBERS) + product_N, float("-inf")))
            mixed_N = tl.where(prob_N > TINY, tl.log(prob_N), tl.where(prob_N == prob_N, small_N, prob_N))
            tl.store(logp_BV + row.to(tl.int64) * V + v_N, mixed_N, mask=v_N < V)
        better_N = (prob_N > best_N) & (v_N < V)
        best_N = tl.where(better_N, prob_N, best_N)
        token_N = tl.where(better_N, v_N, token_N)
    top = tl.max(best_N, 0)
    tl.store(best_BP + row * P + piece, top)
    tl.store(token_BP + row * P + piece, tl.min(tl.where(best_N == top, token_N, 2147483647), 0))


@triton.jit
def best_kernel(best_BP, token_BP, token_B, logprob_B, P: tl.constexpr):  # type: ignore[no-untyped-def]
    """The likeliest token, the first of equals, and its log-probability: NaN where a member's row is. Grid: rows."""
    row = tl.program_id(0)
    p_P = row * P + tl.arange(0, P)
    best_P = tl.load(best_BP + p_P)
    top = tl.max(best_P, 0)
    token = tl.min(tl.where(best_P == top, tl.load(token_BP + p_P), 2147483647), 0)
    tl.store(token_B + row, token.to(tl.int64))
    tl.store(logprob_B + row, tl.where(top < 0, float("nan"), tl.log(tl.maximum(top, 0.0))))


@triton.jit
def loglik_kernel(  # type: ignore[no-untyped-def]
    x_MBV, lse_BM, count_BM, max_BP, sum_BP, token_B, loglik_BL, stride_m, stride_b,
    MEMBERS: tl.constexpr, MP: tl.constexpr, P: tl.constexpr, FLOOR: tl.constexpr,
):  # fmt: skip
    """What each component gave a row's token. Grid: rows."""
    row = tl.program_id(0)
    m_M = tl.arange(0, MP)
    real_M = m_M < MEMBERS
    lse_M = tl.load(lse_BM + row * MEMBERS + m_M, mask=real_M, other=0.0)
    count_M1 = tl.load(count_BM + row * MEMBERS + m_M, mask=real_M, other=0.0)[:, None]
    x_M = x_MBV + m_M.to(tl.int64) * stride_m + row.to(tl.int64) * stride_b + tl.load(token_B + row)
    logp_M = tl.load(x_M, mask=real_M, other=0.0).to(tl.float32) - lse_M
    score = tl.sum(_score(logp_M[:, None], count_M1, FLOOR), 0)
    base_logp = tl.sum(tl.where(m_M == 0, logp_M, 0.0), 0)
    tl.store(loglik_BL + row * (MEMBERS + 1) + m_M, logp_M, mask=real_M)
    tl.store(
        loglik_BL + row * (MEMBERS + 1) + MEMBERS, _product_logp(score, base_logp, _product_sum(max_BP, sum_BP, row, P))
    )
