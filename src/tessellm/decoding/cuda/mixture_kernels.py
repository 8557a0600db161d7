"""The passes of a mixture of laws over whole vocabularies, as Triton kernels: members' logits are read three times, and
nothing as large as they are is written.

    part_kernel      the largest logit of each member, and the sum of exponentials, per piece of a row
    sums_kernel      Σ p log p and Σ p log p_b of each member, and the sum of Eq. 2, per piece
    finish_kernel    the same of whole rows, and what each law said of the token fed
    mixture_kernel   the likeliest token of Σ belief · p_law per piece; also the law itself, where that is wanted
    best_kernel      the likeliest token of whole rows
    pending_kernel   the laws' last row

Logits that are −∞ are impossible tokens. A member with NaN or +∞ in a row has NaN throughout, as by `log_softmax`.

Shapes: M members, padded to MP; R = B·T rows, of which row b·T + t is position t of text b; P pieces of a row; L = M+1
laws; V vocabulary.
"""

from __future__ import annotations

import triton
import triton.language as tl

COUNTS = ["T", "TO", "first", "rows", "blocks"]  # numbers of which no kernel is compiled anew


@triton.jit
def _row_at(row, T, first, stride_b, stride_t):  # type: ignore[no-untyped-def]
    """Where a row of logits begins; rows of each text are counted from its position `first` on."""
    return (row // T).to(tl.int64) * stride_b + (row % T + first).to(tl.int64) * stride_t


@triton.jit
def _exp(x, top):  # type: ignore[no-untyped-def]
    """e^(x − top); 0 where x is −∞, also where top is."""
    return tl.where(x == float("-inf"), 0.0, tl.exp(x - top))


@triton.jit(do_not_specialize=COUNTS)
def part_kernel(  # type: ignore[no-untyped-def]
    x_MBTV, max_MRP, sum_MRP, V, T, rows, blocks, stride_m, stride_b, stride_t,
    P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: rows, members, pieces."""
    row, member, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    x = x_MBTV + member.to(tl.int64) * stride_m + _row_at(row, T, 0, stride_b, stride_t)
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
    tl.store(max_MRP + place, top)
    tl.store(sum_MRP + place, tl.sum(sum_N * _exp(top_N, top), 0))


@triton.jit
def _member_sums(max_MRP, sum_MRP, row, rows, m_M, MEMBERS: tl.constexpr, P: tl.constexpr):  # type: ignore[no-untyped-def]
    """The log of each member's sum of exponentials: [MP]; NaN where nothing is possible, as by a softmax."""
    place_MP = (m_M[:, None] * rows + row) * P + tl.arange(0, P)[None, :]
    real_M1 = m_M[:, None] < MEMBERS
    max_MP = tl.load(max_MRP + place_MP, mask=real_M1, other=0.0)
    sum_MP = tl.load(sum_MRP + place_MP, mask=real_M1, other=1.0)
    top_M = tl.max(max_MP, 1)
    lse_M = top_M + tl.log(tl.sum(sum_MP * _exp(max_MP, top_M[:, None]), 1))
    return tl.where(top_M == float("-inf"), float("nan"), lse_M)


@triton.jit
def _score(logp_MN, m_M, MEMBERS: tl.constexpr, FLOOR: tl.constexpr):  # type: ignore[no-untyped-def]
    """Eq. 2 before it is normalised, over members in rows: [N]. The base counts 2 − MEMBERS times."""
    counted_MN = tl.where(m_M[:, None] == 0, (2.0 - MEMBERS) * tl.maximum(logp_MN, FLOOR), logp_MN)
    return tl.sum(tl.where(m_M[:, None] < MEMBERS, counted_MN, 0.0), 0)


@triton.jit(do_not_specialize=COUNTS)
def sums_kernel(  # type: ignore[no-untyped-def]
    x_MBTV, max_MRP, sum_MRP, lse_RM, own_RPM, base_RPM, max_RP, sum_RP, V, T, rows, blocks,
    stride_m, stride_b, stride_t,
    MEMBERS: tl.constexpr, MP: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, FLOOR: tl.constexpr,
):  # fmt: skip
    """Grid: rows, pieces."""
    row, piece = tl.program_id(0), tl.program_id(1)
    m_M = tl.arange(0, MP)
    lse_M = _member_sums(max_MRP, sum_MRP, row, rows, m_M, MEMBERS, P)
    if piece == 0:
        tl.store(lse_RM + row * MEMBERS + m_M, lse_M, mask=m_M < MEMBERS)
    x_M1 = x_MBTV + m_M[:, None].to(tl.int64) * stride_m + _row_at(row, T, 0, stride_b, stride_t)
    own_MN = tl.zeros((MP, BLOCK), tl.float32)
    base_MN = tl.zeros((MP, BLOCK), tl.float32)
    top_N = tl.full((BLOCK,), float("-inf"), tl.float32)
    sum_N = tl.zeros((BLOCK,), tl.float32)
    for start in range(piece * blocks * BLOCK, tl.minimum((piece + 1) * blocks * BLOCK, V), BLOCK):
        v_N = start + tl.arange(0, BLOCK)
        real_MN = (m_M[:, None] < MEMBERS) & (v_N < V)[None, :]
        logp_MN = tl.load(x_M1 + v_N[None, :], mask=real_MN, other=float("-inf")).to(tl.float32) - lse_M[:, None]
        prob_MN = _exp(logp_MN, 0.0)
        safe_MN = tl.maximum(logp_MN, FLOOR)
        safe_N = tl.sum(tl.where(m_M[:, None] == 0, safe_MN, 0.0), 0)
        own_MN += prob_MN * safe_MN
        base_MN += prob_MN * safe_N[None, :]
        score_N = tl.where(v_N < V, _score(logp_MN, m_M, MEMBERS, FLOOR), float("-inf"))
        new_N = tl.maximum(top_N, score_N)
        sum_N = sum_N * _exp(top_N, new_N) + _exp(score_N, new_N)
        top_N = new_N
    place_M = (row * P + piece) * MEMBERS + m_M
    tl.store(own_RPM + place_M, tl.sum(own_MN, 1), mask=m_M < MEMBERS)
    tl.store(base_RPM + place_M, tl.sum(base_MN, 1), mask=m_M < MEMBERS)
    top = tl.max(top_N, 0)
    tl.store(max_RP + row * P + piece, top)
    tl.store(sum_RP + row * P + piece, tl.sum(sum_N * _exp(top_N, top), 0))


@triton.jit
def _equation_sum(max_RP, sum_RP, row, P: tl.constexpr):  # type: ignore[no-untyped-def]
    """The log of Eq. 2's sum over a row; −∞ where nothing is possible."""
    p_P = row * P + tl.arange(0, P)
    max_P, sum_P = tl.load(max_RP + p_P), tl.load(sum_RP + p_P)
    top = tl.max(max_P, 0)
    return top + tl.log(tl.sum(sum_P * _exp(max_P, top), 0))


@triton.jit
def _equation_law(score, base_logp, equation):  # type: ignore[no-untyped-def]
    """Eq. 2's law; where nothing is possible by it, the base's."""
    return tl.where(equation == float("-inf"), base_logp, score - equation)


@triton.jit(do_not_specialize=COUNTS)
def finish_kernel(  # type: ignore[no-untyped-def]
    x_MBTV, lse_RM, own_RPM, base_RPM, max_RP, sum_RP, pending_BLV, token_BT, mask_BT, own_RM, base_RM, equation_R,
    said_RL, T, stride_m, stride_b, stride_t, pending_b, pending_l,
    MEMBERS: tl.constexpr, MP: tl.constexpr, P: tl.constexpr, FLOOR: tl.constexpr,
):  # fmt: skip
    """Sums of whole rows; what each law said of the token fed: the row before, or the pending one of the text. Grid:
    rows."""
    row = tl.program_id(0)
    m_M = tl.arange(0, MP)
    real_M = m_M < MEMBERS
    piece_PM = (row * P + tl.arange(0, P)[:, None]) * MEMBERS + m_M[None, :]
    own_PM = tl.load(own_RPM + piece_PM, mask=real_M[None, :], other=0.0)
    base_PM = tl.load(base_RPM + piece_PM, mask=real_M[None, :], other=0.0)
    tl.store(own_RM + row * MEMBERS + m_M, tl.sum(own_PM, 0), mask=real_M)
    tl.store(base_RM + row * MEMBERS + m_M, tl.sum(base_PM, 0), mask=real_M)
    tl.store(equation_R + row, _equation_sum(max_RP, sum_RP, row, P))
    token = tl.load(token_BT + row)
    said = said_RL + row * (MEMBERS + 1)
    follows = row % T > 0
    if follows:
        follows = tl.load(mask_BT + row - 1) != 0
    if follows:
        before = row - 1
        x_M = x_MBTV + m_M.to(tl.int64) * stride_m + _row_at(before, T, 0, stride_b, stride_t) + token
        lse_M = tl.load(lse_RM + before * MEMBERS + m_M, mask=real_M, other=0.0)
        logp_M = tl.load(x_M, mask=real_M, other=0.0).to(tl.float32) - lse_M
        score = tl.sum(_score(logp_M[:, None], m_M, MEMBERS, FLOOR), 0)
        base_logp = tl.sum(tl.where(m_M == 0, logp_M, 0.0), 0)
        law = _equation_law(score, base_logp, _equation_sum(max_RP, sum_RP, before, P))
        tl.store(said + m_M, tl.maximum(logp_M, FLOOR, propagate_nan=tl.PropagateNan.ALL), mask=real_M)
        tl.store(said + MEMBERS, tl.maximum(law, FLOOR, propagate_nan=tl.PropagateNan.ALL))
    else:
        pending = pending_BLV + (row // T).to(tl.int64) * pending_b + token
        logp_M = tl.load(pending + m_M.to(tl.int64) * pending_l, mask=real_M, other=0.0)
        law = tl.load(pending + MEMBERS * pending_l.to(tl.int64))
        tl.store(said + m_M, tl.maximum(logp_M, FLOOR, propagate_nan=tl.PropagateNan.ALL), mask=real_M)
        tl.store(said + MEMBERS, tl.maximum(law, FLOOR, propagate_nan=tl.PropagateNan.ALL))


@triton.jit(do_not_specialize=COUNTS)
def mixture_kernel(  # type: ignore[no-untyped-def]
    x_MBTV, lse_RM, equation_R, belief_RL, best_RP, token_RP, law_RV, V, T, TO, first, blocks,
    stride_m, stride_b, stride_t,
    MEMBERS: tl.constexpr, MP: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, FLOOR: tl.constexpr,
    TINY: tl.constexpr, WRITE: tl.constexpr,
):  # fmt: skip
    """Of the rows from position `first` of each text on, TO of them. Grid: rows, pieces."""
    out, piece = tl.program_id(0), tl.program_id(1)
    row = out // TO * T + out % TO + first
    m_M = tl.arange(0, MP)
    real_M = m_M < MEMBERS
    lse_M = tl.load(lse_RM + row * MEMBERS + m_M, mask=real_M, other=0.0)
    equation = tl.load(equation_R + row)
    belief = belief_RL + row * (MEMBERS + 1)
    weight_M = tl.exp(tl.load(belief + m_M, mask=real_M, other=float("-inf")))
    own = tl.exp(tl.load(belief + MEMBERS))
    x_M1 = x_MBTV + m_M[:, None].to(tl.int64) * stride_m + _row_at(out, TO, first, stride_b, stride_t)
    best_N = tl.full((BLOCK,), -1.0, tl.float32)
    token_N = tl.zeros((BLOCK,), tl.int32)
    for start in range(piece * blocks * BLOCK, tl.minimum((piece + 1) * blocks * BLOCK, V), BLOCK):
        v_N = start + tl.arange(0, BLOCK)
        real_MN = real_M[:, None] & (v_N < V)[None, :]
        logp_MN = tl.load(x_M1 + v_N[None, :], mask=real_MN, other=float("-inf")).to(tl.float32) - lse_M[:, None]
        base_N = tl.sum(tl.where(m_M[:, None] == 0, logp_MN, 0.0), 0)
        law_N = _equation_law(_score(logp_MN, m_M, MEMBERS, FLOOR), base_N, equation)
        prob_N = tl.sum(weight_M[:, None] * _exp(logp_MN, 0.0), 0) + own * _exp(law_N, 0.0)
        if WRITE:
            small_N = tl.load(belief) + base_N
            said_N = tl.where(prob_N > TINY, tl.log(prob_N), tl.where(prob_N == prob_N, small_N, prob_N))
            tl.store(law_RV + out.to(tl.int64) * V + v_N, said_N, mask=v_N < V)
        better_N = (prob_N > best_N) & (v_N < V)
        best_N = tl.where(better_N, prob_N, best_N)
        token_N = tl.where(better_N, v_N, token_N)
    top = tl.max(best_N, 0)
    tl.store(best_RP + out * P + piece, top)
    tl.store(token_RP + out * P + piece, tl.min(tl.where(best_N == top, token_N, 2147483647), 0))


@triton.jit(do_not_specialize=COUNTS)
def best_kernel(  # type: ignore[no-untyped-def]
    best_RP, token_RP, lse_RM, token_R, logprob_R, T, TO, first,
    MEMBERS: tl.constexpr, MP: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """The likeliest token, the first of equals, and its log-probability: NaN where a member's row is. Grid: rows."""
    out = tl.program_id(0)
    row = out // TO * T + out % TO + first
    m_M, p_P = tl.arange(0, MP), tl.arange(0, P)
    lse_M = tl.load(lse_RM + row * MEMBERS + m_M, mask=m_M < MEMBERS, other=0.0)
    broken = tl.sum((lse_M != lse_M).to(tl.int32), 0) > 0
    best_P = tl.load(best_RP + out * P + p_P)
    top = tl.max(best_P, 0)
    token = tl.min(tl.where(best_P == top, tl.load(token_RP + out * P + p_P), 2147483647), 0)
    tl.store(token_R + out, token.to(tl.int64))
    tl.store(logprob_R + out, tl.where(broken, float("nan"), tl.log(top)))


@triton.jit(do_not_specialize=COUNTS)
def pending_kernel(  # type: ignore[no-untyped-def]
    x_MBTV, lse_RM, equation_R, last_B, old_BLV, new_BLV, V, T, stride_m, stride_b, stride_t,
    old_b, old_l, new_b, new_l,
    MEMBERS: tl.constexpr, MP: tl.constexpr, BLOCK: tl.constexpr, FLOOR: tl.constexpr, IN_PLACE: tl.constexpr,
):  # fmt: skip
    """The laws at the last real row of each text; what was pending before where it has none. Grid: texts, blocks."""
    text = tl.program_id(0)
    v_N = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_M = tl.arange(0, MP)
    real_MN = (m_M[:, None] < MEMBERS) & (v_N < V)[None, :]
    last = tl.load(last_B + text).to(tl.int32)
    old = old_BLV + text.to(tl.int64) * old_b
    new = new_BLV + text.to(tl.int64) * new_b
    place_MN = m_M[:, None].to(tl.int64) * new_l + v_N[None, :]
    if last >= 0:
        row = text * T + last
        x_M1 = x_MBTV + m_M[:, None].to(tl.int64) * stride_m + _row_at(row, T, 0, stride_b, stride_t)
        lse_M = tl.load(lse_RM + row * MEMBERS + m_M, mask=m_M < MEMBERS, other=0.0)
        logp_MN = tl.load(x_M1 + v_N[None, :], mask=real_MN, other=0.0).to(tl.float32) - lse_M[:, None]
        base_N = tl.sum(tl.where(m_M[:, None] == 0, logp_MN, 0.0), 0)
        law_N = _equation_law(_score(logp_MN, m_M, MEMBERS, FLOOR), base_N, tl.load(equation_R + row))
        tl.store(new + place_MN, logp_MN, mask=real_MN)
        tl.store(new + MEMBERS * new_l.to(tl.int64) + v_N, law_N, mask=v_N < V)
    elif not IN_PLACE:
        for law in range(MEMBERS + 1):
            row_N = tl.load(old + law * old_l.to(tl.int64) + v_N, mask=v_N < V, other=0.0)
            tl.store(new + law * new_l.to(tl.int64) + v_N, row_N, mask=v_N < V)
