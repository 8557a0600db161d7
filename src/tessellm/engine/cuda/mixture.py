"""Mixing on a GPU, in few launches: kernels for what is as large as a vocabulary.

Shapes: M members, L = M + 1 components, B rows, P pieces of a row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from ...rules.equation import LOG_FLOOR
from .compiled_rule import together
from .mixture_kernels import best_kernel, loglik_kernel, mixture_kernel, part_kernel, sums_kernel

MOST_MEMBERS = 16  # whose rows one program holds
PIECES = ((8, 128), (64, 32))  # below so many rows, pieces of each, which keep a device busy
FEW_PIECES = 8
BLOCK = 2048  # logits of one member that a program reads at once
MEMBER_BLOCK, MANY = 512, 8  # the same of all members, and members from which on it is half as much
TINY = torch.finfo(torch.float32).tiny


class KernelMixed:
    """The last position of some rows, mixed by their components: see passes.Mixed."""

    def __init__(self, logits_M: Sequence[Tensor], log_pi_BL: Tensor, count_BM: Tensor):
        self.x_MBV = together([logits[:, -1] for logits in logits_M])
        if self.x_MBV.stride(-1) != 1:
            self.x_MBV = self.x_MBV.contiguous()
        self.log_pi_BL, self.count_BM = log_pi_BL.contiguous(), count_BM.contiguous()
        self.members, self.rows, self.vocabulary = self.x_MBV.shape
        padded = triton.next_power_of_2(self.members)
        block = MEMBER_BLOCK if padded <= MANY else MEMBER_BLOCK // 2
        self.sizes: dict[str, Any] = {"MEMBERS": self.members, "MP": padded, "FLOOR": LOG_FLOOR}
        self.pieces = self._pieces(block)
        self.P = self.pieces["P"]
        self.strides = self.x_MBV.stride()[:2]
        self._read()

    def _pieces(self, block: int) -> dict[str, int]:
        """Choose into how many pieces a row is cut, and of how many blocks each is."""
        pieces = next((pieces for below, pieces in PIECES if self.rows < below), FEW_PIECES)
        return {"blocks": triton.cdiv(triton.cdiv(self.vocabulary, block), pieces), "P": pieces, "BLOCK": block}

    def _read(self) -> None:
        """Read all logits twice: sums of exponentials, and of the product."""
        members, rows, where = self.members, self.rows, {"V": self.vocabulary, "rows": self.rows}
        where |= dict(zip(("stride_m", "stride_b"), self.strides, strict=True))
        max_MBP, sum_MBP = self._new(2, members, rows, self.P)
        self.lse_BM = self._new(rows, members)
        self.max_BP, self.sum_BP = self._new(2, rows, self.P)
        part_kernel[(rows, members, self.P)](self.x_MBV, max_MBP, sum_MBP, **where, **self._pieces(BLOCK))
        sums_kernel[(rows, self.P)](
            self.x_MBV, max_MBP, sum_MBP, self.count_BM, self.lse_BM, self.max_BP, self.sum_BP, **where, **self.pieces,
            **self.sizes,
        )  # fmt: skip

    @property
    def nonfinite_BM(self) -> Tensor:
        return self.lse_BM.isnan()

    def best(self) -> tuple[Tensor, Tensor]:
        return self._mix(write=False)[:2]

    @property
    def logp_BV(self) -> Tensor:
        return self._mix(write=True)[2]

    def _mix(self, write: bool) -> tuple[Tensor, Tensor, Tensor]:
        best_BP, token_BP = self._new(self.rows, self.P), self._new(self.rows, self.P, dtype=torch.int32)
        token_B, logprob_B = self._new(self.rows, dtype=torch.long), self._new(self.rows)
        logp_BV = self._new(self.rows, self.vocabulary if write else 0)
        mixture_kernel[(self.rows, self.P)](
            self.x_MBV, self.lse_BM, self.count_BM, self.max_BP, self.sum_BP, self.log_pi_BL, best_BP, token_BP,
            logp_BV, self.vocabulary, self.pieces["blocks"], *self.strides, P=self.P, BLOCK=self.pieces["BLOCK"],
            TINY=TINY, WRITE=write, **self.sizes,
        )  # fmt: skip
        best_kernel[(self.rows,)](best_BP, token_BP, token_B, logprob_B, P=self.P)
        return token_B, logprob_B, logp_BV

    def loglik(self, token_B: Tensor) -> Tensor:
        loglik_BL = self._new(self.rows, self.members + 1)
        loglik_kernel[(self.rows,)](
            self.x_MBV, self.lse_BM, self.count_BM, self.max_BP, self.sum_BP, token_B.contiguous(), loglik_BL,
            *self.strides, P=self.P, **self.sizes,
        )  # fmt: skip
        return loglik_BL

    def _new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.x_MBV.device)
