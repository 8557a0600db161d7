"""Prefill: which prompts are fed next and how much of each, so that others go on while a long one is read.

Prompts are fed in chunks, several at a time where little of the pass is padding. When memory runs out, fewer are fed at
once, then in shorter pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .prefixes import Prefixes
from .requests import Request
from .sampling import how
from .state import SlotState
from .steps import Steps
from .voices import Special, special

CHUNK = 256  # tokens of a prompt that are fed at once
PASS_TOKENS = 2048  # padded tokens of one pass
CHUNK_ON_GPU = 2048  # there, starting the kernels of a pass takes as long as computing so many
PASS_TOKENS_ON_GPU = 4096
MOST_PADDED = 1.5  # times the real tokens of a pass
SMALLEST_CHUNK = 16


@dataclass(frozen=True)
class Portion:
    """What one pass feeds: so many tokens of each request's prompt, all in the middle of them or all to their ends."""

    requests: list[Request]
    counts: list[int]
    last: bool
    asked: Special | None

    @property
    def width(self) -> int:
        return max(self.counts)

    @property
    def slots(self) -> list[int]:
        return [request.slot for request in self.requests if request.slot is not None]

    def tokens(self) -> tuple[Tensor, Tensor]:
        """Tokens and positions, padded on the left: [B, width]."""
        token_BT = torch.zeros(len(self.requests), self.width, dtype=torch.long)
        position_BT = torch.full((len(self.requests), self.width), -1)
        for b, (request, count) in enumerate(zip(self.requests, self.counts, strict=True)):
            token_BT[b, self.width - count :] = torch.tensor(request.prompt[request.fed : request.fed + count])
            position_BT[b, self.width - count :] = torch.arange(request.fed, request.fed + count)
        return token_BT, position_BT


class Prefill:
    """Feeds the prompts of the requests in the slots, a pass at a time."""

    def __init__(self, state: SlotState, steps: Steps, prefixes: Prefixes, window: int):
        self.state, self.steps, self.prefixes, self.window = state, steps, prefixes, window
        on_gpu = state.device.type == "cuda"
        self.chunk = CHUNK_ON_GPU if on_gpu else CHUNK  # less when memory runs out
        self.pass_tokens = PASS_TOKENS_ON_GPU if on_gpu else PASS_TOKENS
        self.patient = on_gpu  # there one prompt costs what several do
        self._waited = 0  # steps that prompts have waited, all of them together

    def next(self, in_slot: Sequence[Request | None], queued: bool = False) -> Portion | None:
        """What to feed now; `queued`: while others wait for a slot. Beginnings that a cache holds already are taken
        from there."""
        rows = [r for r in in_slot if r is not None and not r.prefilled and not self.prefixes.waits(r, in_slot)]
        if not rows or (queued and self._waits(rows, in_slot)):
            return None
        for request in rows:
            if not request.fed:
                request.fed = self.prefixes.reuse(request, self.state.copy_cells)
        last = self._ends(rows[0])
        chosen, counts = [rows[0]], [self._takes(rows[0])]
        for request in rows[1:]:
            takes = self._takes(request)
            padded = max(takes, *counts) * (len(chosen) + 1)
            fits = padded <= min(self.pass_tokens, MOST_PADDED * (sum(counts) + takes))
            if fits and self._ends(request) == last:
                chosen.append(request)
                counts.append(takes)
        return Portion(chosen, counts, last, special(chosen, range(len(chosen))) if last else None)

    def _waits(self, rows: Sequence[Request], in_slot: Sequence[Request | None]) -> bool:
        """Whether prompts wait for others to be read with. A short one costs about what a step of all slots does, since
        both read all weights; a slot that waits costs its share of a step. Half of what may be saved is risked."""
        running = sum(r is not None and r.prefilled for r in in_slot)
        if not self.patient or not running or any(r.fed for r in rows):
            return False
        self._waited += len(rows)
        if 2 * self._waited <= running:
            return True
        self._waited = 0
        return False

    def feed(self, portion: Portion) -> None:
        wanted = how(request.sampling for request in portion.requests) if portion.last else None
        self.steps.prefill(portion.slots, *portion.tokens(), wanted, portion.asked)
        for request, count in zip(portion.requests, portion.counts, strict=True):
            request.fed += count
            self.prefixes.wrote(request.slot, request.prompt[: request.fed])

    def feed_less(self, portion: Portion) -> bool:
        """Memory ran out: from now on fewer prompts at once, then shorter pieces. False: there is nothing shorter."""
        if len(portion.requests) > 1:
            self.pass_tokens = portion.width * (len(portion.requests) // 2)
        elif self.chunk > SMALLEST_CHUNK and portion.width > SMALLEST_CHUNK + self.window:
            self.chunk = max(SMALLEST_CHUNK, self.chunk // 2)
        else:
            return False
        return True

    def _takes(self, request: Request) -> int:
        """How much of its prompt is fed next. The last piece is never shorter than the rule's window."""
        left = len(request.prompt) - request.fed
        return left if left <= self.chunk + self.window else self.chunk

    def _ends(self, request: Request) -> bool:
        return self._takes(request) == len(request.prompt) - request.fed
