"""The observer of a composition at work: keeps a few numbers of every row, in order, on the device.

It sees what the model composes, in blocks of any length, and what was written next: the row before each token is kept
until that token is known. Nothing waits for the host before `finish`.

Shapes: M members, B batch, T time, V vocabulary, N: the members, then the composition.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..model import ComposedForCausalLM
from ..rules import Explanation
from .row_statistics import Statistics, statistics


class Recorder:
    """Set it as the `observer` of a cache. With `last_only` it keeps one row a call: the next token's."""

    def __init__(self, model: ComposedForCausalLM, last_only: bool = False):
        self.rule = model.rule
        self.ends = tuple(tuple(member.get("end_ids", ())) for member in model.config.members)
        self.last_only = last_only
        self.blocks: list[Statistics] = []
        self._logprobs: list[Tensor] = []  # log-probabilities of the tokens that were written, [B, T, N]
        self._pending: tuple[Tensor, Tensor] | None = None

    def __call__(self, logp_MBTV: Tensor, tokens_BT: Tensor, composed_BTV: Tensor, why: Explanation) -> None:
        if self.last_only:
            logp_MBTV, tokens_BT, composed_BTV = logp_MBTV[:, :, -1:], tokens_BT[:, -1:], composed_BTV[:, -1:]
            why = why.map(lambda each: each[:, -1:])
        self._hear(tokens_BT[:, :1])
        if tokens_BT.shape[1] > 1:
            self._logprobs.append(log_probabilities(logp_MBTV[:, :, :-1], composed_BTV[:, :-1], tokens_BT[:, 1:]))
        self.blocks.append(statistics(logp_MBTV, composed_BTV, self.rule, self.ends, why))
        self._pending = alone(logp_MBTV[:, :, -1:]), alone(composed_BTV[:, -1:])

    def _hear(self, token_B1: Tensor) -> None:
        if self._pending is not None:
            self._logprobs.append(log_probabilities(*self._pending, token_B1))

    def finish(self, token_B1: Tensor) -> dict[str, Tensor]:
        """Everything by name, [B, rows, …] on the host, once the last token is known."""
        self._hear(token_B1)
        blocks = [block.columns() for block in self.blocks]
        columns = {name: torch.cat([block[name] for block in blocks], 1).cpu() for name in blocks[0]}
        columns["logprob"] = torch.cat(self._logprobs, 1).cpu()
        return columns


def alone(rows: Tensor) -> Tensor:
    """The rows without the block that they were cut from, which they would keep in memory."""
    return rows if rows.untyped_storage().nbytes() == rows.numel() * rows.element_size() else rows.clone()


def log_probabilities(logp_MBTV: Tensor, composed_BTV: Tensor, token_BT: Tensor) -> Tensor:
    """What every voice gave to each row's token: [B, T, N]."""
    members_MBT = logp_MBTV.gather(-1, token_BT[None, ..., None].expand(len(logp_MBTV), -1, -1, 1))[..., 0]
    composed_BT = composed_BTV.gather(-1, token_BT[..., None])[..., 0]
    return torch.cat([members_MBT, composed_BT[None].to(members_MBT.dtype)]).permute(1, 2, 0)
