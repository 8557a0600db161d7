"""A mixture of laws on a GPU, in few launches: kernels for what is as large as a vocabulary, a compiled function for
the belief, which is not.

It says what the rule says, whatever comes: one token of many texts, prompts, drafts. The belief is compiled for one
token and for blocks of READ_ROWS, per bucket of texts; what is shorter is filled up with padding.

Shapes: M members, K experts, L = M+1 laws, B texts, T tokens per text, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ...rules import Rule
from ...rules.equation import LOG_FLOOR
from ...rules.laws import Heard, expert_numbers
from ...rules.rows import last_place
from ..buffers import Judged, row_bucket
from ..passes import READ_ROWS, Decided, RuleRunner, standing
from .compiled_rule import compiled_functions, together
from .mixture_kernels import best_kernel, finish_kernel, mixture_kernel, part_kernel, pending_kernel, sums_kernel

MOST_MEMBERS = 16  # whose rows one program holds
PIECES = ((8, 128), (64, 32))  # below so many rows, pieces of each, which keep a device busy
FEW_PIECES = 8
BLOCK = 2048  # logits of one member that a program reads at once
FEW_TEXTS = 16  # for which the belief over blocks is compiled, if not for one: padding costs it next to nothing
MEMBER_BLOCK, MANY = 512, 8  # the same of all members, and members from which on it is half as much
TINY = torch.finfo(torch.float32).tiny


class RowSums(NamedTuple):
    """What a pass over the members' logits brings."""

    lse_BTM: Tensor  # log of the sum of exponentials
    own_BTM: Tensor  # Σ p log p
    base_BTM: Tensor  # Σ p log p_b
    equation_BT: Tensor  # log Z of Eq. 2; −∞ where nothing is possible
    said_BTL: Tensor  # each law's log-probability of the token fed


class LogitRows:
    """The logits of all members over some rows, and the kernels that read them."""

    def __init__(self, logits_M: Sequence[Tensor]):
        self.x_MBTV = together(logits_M)
        if self.x_MBTV.stride(-1) != 1:
            self.x_MBTV = self.x_MBTV.contiguous()
        self.members, self.texts, self.tokens, self.vocabulary = self.x_MBTV.shape
        self.padded = triton.next_power_of_2(self.members)
        self.sizes = {"MEMBERS": self.members, "MP": self.padded, "FLOOR": LOG_FLOOR}
        self.strides = self.x_MBTV.stride()[:3]
        self.block = MEMBER_BLOCK if self.padded <= MANY else MEMBER_BLOCK // 2

    def _pieces(self, rows: int, block: int) -> dict[str, int]:
        """Choose into how many pieces a row is cut, and of how many blocks each is."""
        pieces = next((pieces for below, pieces in PIECES if rows < below), FEW_PIECES)
        return {"blocks": triton.cdiv(triton.cdiv(self.vocabulary, block), pieces), "P": pieces, "BLOCK": block}

    def sums(self, token_BT: Tensor, mask_BT: Tensor, pending_BLV: Tensor) -> RowSums:
        """Read all rows twice."""
        members, rows = self.members, self.texts * self.tokens
        sizes, new = self._pieces(rows, self.block), self._new
        pieces = sizes["P"]
        max_MRP, sum_MRP = new(2, members, rows, pieces)
        lse_BTM, own_BTM, base_BTM = new(3, self.texts, self.tokens, members)
        own_RPM, base_RPM = new(2, rows, pieces, members)
        max_RP, sum_RP = new(2, rows, pieces)
        equation_BT, said_BTL = new(self.texts, self.tokens), new(self.texts, self.tokens, members + 1)
        where = dict(zip(("stride_m", "stride_b", "stride_t"), self.strides, strict=True))
        where |= {"V": self.vocabulary, "T": self.tokens, "rows": rows}
        part_kernel[(rows, members, pieces)](self.x_MBTV, max_MRP, sum_MRP, **where, **self._pieces(rows, BLOCK))
        sums_kernel[(rows, pieces)](
            self.x_MBTV, max_MRP, sum_MRP, lse_BTM, own_RPM, base_RPM, max_RP, sum_RP, **where, **sizes, **self.sizes
        )
        finish_kernel[(rows,)](
            self.x_MBTV, lse_BTM, own_RPM, base_RPM, max_RP, sum_RP, pending_BLV, token_BT.contiguous(),
            mask_BT.contiguous(), own_BTM, base_BTM, equation_BT, said_BTL, self.tokens, *self.strides,
            *pending_BLV.stride()[:2], P=pieces, **self.sizes,
        )  # fmt: skip
        return RowSums(lse_BTM, own_BTM, base_BTM, equation_BT, said_BTL)

    def mixed(self, sums: RowSums, belief_BTL: Tensor, last: int, write: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Mix the laws of each text's `last` rows: the likeliest token, its log-probability, and, if `write`, the whole
        law."""
        rows, first = self.texts * last, self.tokens - last
        sizes = self._pieces(rows, self.block)
        pieces = sizes["P"]
        best_RP, token_RP = self._new(rows, pieces), self._new(rows, pieces, dtype=torch.int32)
        token_BT, logprob_BT = self._new(self.texts, last, dtype=torch.long), self._new(self.texts, last)
        law_BTV = self._new(self.texts, last, self.vocabulary if write else 0)
        mixture_kernel[(rows, pieces)](
            self.x_MBTV, sums.lse_BTM, sums.equation_BT, belief_BTL.contiguous(), best_RP, token_RP, law_BTV,
            self.vocabulary, self.tokens, last, first, sizes.pop("blocks"), *self.strides, TINY=TINY, WRITE=write,
            **sizes, **self.sizes,
        )  # fmt: skip
        best_kernel[(rows,)](
            best_RP, token_RP, sums.lse_BTM, token_BT, logprob_BT, self.tokens, last, first, MEMBERS=self.members,
            MP=self.padded, P=pieces,
        )  # fmt: skip
        return token_BT, logprob_BT, law_BTV

    def pending(self, sums: RowSums, last_B: Tensor, old_BLV: Tensor, in_place: bool = False) -> Tensor:
        """Write the laws' rows at these positions; −1: what was pending stays."""
        new_BLV = old_BLV if in_place else self._new(*old_BLV.shape)
        pending_kernel[(self.texts, triton.cdiv(self.vocabulary, self.block))](
            self.x_MBTV, sums.lse_BTM, sums.equation_BT, last_B, old_BLV, new_BLV, self.vocabulary, self.tokens,
            *self.strides, *old_BLV.stride()[:2], *new_BLV.stride()[:2], BLOCK=self.block, IN_PLACE=in_place,
            **self.sizes,
        )  # fmt: skip
        return new_BLV

    def _new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.x_MBTV.device)


def weigh(
    rule: Any, own_BTM: Tensor, base_BTM: Tensor, said_BTL: Tensor, token_BT: Tensor, mask_BT: Tensor,
    before: Sequence[Tensor], known: Any,
) -> tuple[Tensor, Sequence[Tensor]]:  # fmt: skip
    """The rule's belief at every row, and its state after them; real rows of a text follow one another."""
    averaged_BTKA, now_BTKN = expert_numbers(own_BTM.permute(2, 0, 1), base_BTM.permute(2, 0, 1))
    follows_BT = torch.nn.functional.pad(mask_BT[:, :-1], (1, 0))
    heard = Heard(averaged_BTKA, now_BTKN, said_BTL, mask_BT & (follows_BT | before[0][:, None]))
    belief_BTL, _, after = rule.weigh(heard, token_BT, mask_BT, before, known)
    return belief_BTL, after


class Mixture:
    """A rule that mixes laws, over the logits of its members."""

    def __init__(self, rule: Rule):
        self.rule: Any = rule
        self.compiled = compiled_functions(rule)
        self.known: dict[torch.device, Any] = {}  # the rule's parameters, per device

    def runner(self) -> RuleRunner:
        return RuleRunner(
            self.combine, self.decide, drafts_at_once=False, read_prompts=self.read, judge_drafts=self.judge
        )

    def combine(self, logits_M: Sequence[Tensor], token_BT: Tensor, mask_BT: Tensor, state: Any) -> Any:
        """What is said at every row, broken members, and the state after the last."""
        logits, sums = self._sums(logits_M, token_BT, mask_BT, state)
        belief_BTL, after = self._weigh(sums, token_BT, mask_BT, state[1:])
        law_BTV = logits.mixed(sums, belief_BTL, logits.tokens, write=True)[2]
        pending_BLV = logits.pending(sums, last_place(mask_BT), state[0])
        return law_BTV, _broken(sums), type(state)(pending_BLV, *after)

    def decide(self, logits_M: Sequence[Tensor], token_B1: Tensor, mask_B1: Tensor, state: Any) -> Decided:
        """The likeliest token of every text. The laws' pending rows are written where they are."""
        logits, sums = self._sums(logits_M, token_B1, mask_B1, state)
        belief_B1L, after = self._weigh(sums, token_B1, mask_B1, state[1:])
        token_B1, logprob_B1, _ = logits.mixed(sums, belief_B1L, 1, write=False)
        pending_BLV = logits.pending(sums, mask_B1.long()[:, 0] - 1, state[0], in_place=True)
        return token_B1[:, 0], logprob_B1[:, 0], _broken(sums), type(state)(pending_BLV, *after)

    def read(
        self, logits_M: Sequence[Tensor], token_BT: Tensor, mask_BT: Tensor, state: Any
    ) -> tuple[Tensor, Tensor, Any]:
        """Read prompts, padded on the left: what is said behind the last token, broken members, and the state."""
        if state is None:
            like = torch.empty((), device=token_BT.device)
            state = self.rule.begun(like.expand(len(logits_M), len(token_BT), 1, logits_M[0].shape[-1]))
        behind = (-token_BT.shape[1] % READ_ROWS, 0)
        logits, sums = self._sums(logits_M, token_BT, mask_BT, state)
        whole = [torch.nn.functional.pad(each, behind) for each in (token_BT, mask_BT)]
        own_BTM, base_BTM, said_BTL = (
            torch.nn.functional.pad(each, (0, 0, *behind)) for each in (sums.own_BTM, sums.base_BTM, sums.said_BTL)
        )
        before = state[1:]
        for start in range(0, whole[0].shape[1], READ_ROWS):
            at = slice(start, start + READ_ROWS)
            part = RowSums(sums.lse_BTM, own_BTM[:, at], base_BTM[:, at], sums.equation_BT, said_BTL[:, at])
            belief_BTL, before = self._weigh(part, whole[0][:, at], whole[1][:, at], before)
        last_BTL = belief_BTL[:, -1:].expand(-1, logits.tokens, -1)
        law_B1V = logits.mixed(sums, last_BTL, 1, write=True)[2]
        pending_BLV = logits.pending(sums, last_place(mask_BT), state[0])
        return law_B1V[:, 0], _broken(sums), type(state)(pending_BLV, *before)

    def judge(
        self, logits_M: Sequence[Tensor], fed_BT: Tensor, real_BT: Tensor, state: Any,
        choose: Callable[[Tensor], Tensor] | None,
    ) -> Judged:  # fmt: skip
        """Judge drafts of all texts, padded on the right; the likeliest tokens, or those that are chosen by the law."""
        logits, sums = self._sums(logits_M, fed_BT, real_BT, state)
        belief_BTL, _ = self._weigh(sums, fed_BT, real_BT, state[1:])
        token_BT, logprob_BT, law_BTV = logits.mixed(sums, belief_BTL, logits.tokens, write=choose is not None)
        if choose is not None:
            token_BT = choose(law_BTV)
            logprob_BT = law_BTV.gather(-1, token_BT[..., None])[..., 0]
        accepted_B1, kept_BT = standing(token_BT, fed_BT, real_BT)
        _, after = self._weigh(sums, fed_BT, kept_BT, state[1:])
        pending_BLV = logits.pending(sums, last_place(kept_BT), state[0])
        return Judged(token_BT, logprob_BT, accepted_B1, _broken(sums), type(state)(pending_BLV, *after))

    def _sums(
        self, logits_M: Sequence[Tensor], token_BT: Tensor, mask_BT: Tensor, state: Any
    ) -> tuple[LogitRows, RowSums]:
        logits = LogitRows(logits_M)
        return logits, logits.sums(token_BT, mask_BT, state[0])

    def _weigh(
        self, sums: RowSums, token_BT: Tensor, mask_BT: Tensor, before: Sequence[Tensor]
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Run the compiled belief over one token per text, or over blocks filled up with padding."""
        texts, tokens = token_BT.shape
        device = token_BT.device
        if device not in self.known:
            self.known[device] = self.rule.known_on(device)
        given = [sums.own_BTM, sums.base_BTM, sums.said_BTL, token_BT, mask_BT]
        if tokens > 1:
            more = (1 if texts == 1 else max(FEW_TEXTS, row_bucket(texts))) - texts
            given = [_filled(each, READ_ROWS - tokens, more) for each in given]
            before = [_filled(each, None, more) for each in before]
        run = self.compiled(weigh, self.rule, device, *given[3].shape, given[0].shape[-1])
        belief_BTL, after = run(*_laid_out(given), tuple(_laid_out(before)), self.known[device])
        return belief_BTL[:texts, :tokens], [each[:texts] for each in after]


def _filled(each: Tensor, tokens: int | None, texts: int) -> Tensor:
    """Add padding behind the tokens of every text, unless it has no such dimension, and texts behind them."""
    behind = [0, texts] if tokens is None else [0, tokens, 0, texts]
    return torch.nn.functional.pad(each, [0] * (2 * each.ndim - len(behind)) + behind) if any(behind) else each


def _laid_out(given: Sequence[Tensor]) -> list[Tensor]:
    """Lay tensors out alike, or what was compiled would be compiled again: a dimension of one may have any stride, and
    the compiler looks at it."""
    strides = ([math.prod(each.shape[at + 1 :]) for at in range(each.ndim)] for each in given)
    return [each.contiguous().as_strided(each.shape, stride) for each, stride in zip(given, strides, strict=True)]


def _broken(sums: RowSums) -> Tensor:
    return sums.lse_BTM.isnan().any(1)
