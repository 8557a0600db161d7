"""Which prompts are fed next and how much of each, so that others go on while a long one is read.

Prompts are fed in chunks, several at a time where little of the pass is padding, in the order in which they came. For
people who watch (`keep_pace`), chunks are so short that those who are being written to hardly notice. When memory runs
out, fewer are fed at once, then in shorter chunks. Knows token ids and slots; passes.py computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .buffers import PromptRead
from .prefixes import Prefixes
from .prompt_pace import PromptPace
from .requests import Request

CHUNK = 256  # tokens of a prompt that are fed at once
PASS_TOKENS = 2048  # padded tokens of one pass
READ = 256  # of them that a rule reads at once, whose logits are all computed, unless its window is longer
CHUNK_ON_GPU = 2048  # there, starting the kernels of a pass takes as long as computing so many
PASS_TOKENS_ON_GPU = 4096
MOST_PADDED = 1.5  # padded tokens of a pass over its real ones
SMALLEST_CHUNK = 16


@dataclass(frozen=True)
class Portion:
    """What one pass feeds: so many tokens of each request's prompt, all in the middle of them or all to their ends."""

    requests: list[Request]
    slots: list[int]
    counts: list[int]
    last: bool
    reads: PromptRead

    @property
    def rows(self) -> int:
        """Count the last positions of the pass that the rule reads, if it reads any."""
        pairs = zip(self.requests, self.counts, strict=True)
        return max(min(count, request.fed + count - request.read_from) for request, count in pairs)

    def tokens(self) -> tuple[Tensor, Tensor]:
        """Lay out tokens and positions, padded on the left with tokens of the same row: [B, width]."""
        tokens, positions, width = [], [], max(self.counts)
        for request, count in zip(self.requests, self.counts, strict=True):
            own = request.prompt[request.fed : request.fed + count]
            tokens.append(own[:1] * (width - count) + own)
            positions.append([-1] * (width - count) + list(range(request.fed, request.fed + count)))
        return torch.tensor(tokens), torch.tensor(positions)


class PromptSchedule:
    """Chooses what each pass feeds of the prompts in the slots."""

    def __init__(self, prefixes: Prefixes, window: int, on_gpu: bool):
        """`window`: the longest of any rule."""
        self.prefixes, self.window = prefixes, window
        self.chunk = CHUNK_ON_GPU if on_gpu else CHUNK  # less when memory runs out
        self.pass_tokens = PASS_TOKENS_ON_GPU if on_gpu else PASS_TOKENS
        self.on_gpu = self.patient = on_gpu  # there one prompt costs what several do
        self.pace: PromptPace | None = None
        self._waited = 0  # steps that prompts have waited, summed over prompts

    def keep_pace(self, seconds: Mapping[int, float] | None = None) -> None:
        """Feed prompts in chunks that take little longer than a step, while others are being written to. `seconds` of
        passes over so many tokens, where they are known."""
        self.pace = PromptPace(self.on_gpu, seconds)

    @property
    def longest_step(self) -> float:
        """The seconds that a step may take."""
        return math.inf if self.pace is None else self.pace.longest

    def next(
        self, in_slot: Sequence[Request | None], queued: bool, copy: Callable[[int, int, int], None]
    ) -> Portion | None:
        """Choose what to feed now; `queued`: others wait for a slot. Beginnings that a cache holds are copied."""
        rows = {slot: r for slot, r in enumerate(in_slot) if r is not None and not r.asked}
        rows = {slot: r for slot, r in rows.items() if not self.prefixes.waits(r, in_slot)}
        if not rows or (queued and self._waits(list(rows.values()), in_slot)):
            return None
        paced = self.pace.tokens if self.pace and any(r is not None and r.asked for r in in_slot) else None
        most = self.pass_tokens if paced is None else min(paced, self.pass_tokens)
        takes: dict[int, int] = {}
        kind = (False, PromptRead.NOTHING)
        for slot, request in sorted(rows.items(), key=lambda row: row[1].number):
            if not request.fed:
                request.advance(fed=self.prefixes.reuse(request, slot, copy))
            count, own = self._piece(request, paced)
            padded = max([count, *takes.values()]) * (len(takes) + 1)
            fits = padded <= min(most, MOST_PADDED * (sum(takes.values()) + count))
            if not takes or (fits and own == kind):
                takes[slot], kind = count, own
        if self.pace is not None:
            self.pace.feed(max(takes.values()) * len(takes))
        return Portion([rows[slot] for slot in takes], list(takes), list(takes.values()), *kind)

    def _piece(self, request: Request, paced: int | None) -> tuple[int, tuple[bool, PromptRead]]:
        """Choose how many tokens of a prompt are fed next; whether it ends with them, and what its rule reads of them.
        What it reads is fed at once, unless others would wait for it or there is much of it: then piece by piece."""
        left, chunk = len(request.prompt) - request.fed, min(self.chunk, paced or self.chunk)
        outside = max(0, request.read_from - request.fed)  # tokens before those that the rule reads
        begun = request.fed > request.read_from
        slowly = begun or (paced is not None and left > chunk)
        if not slowly and left <= chunk + self.window and left - outside <= max(READ, self.window + 1):
            return left, (True, PromptRead.BEGIN)
        if outside >= chunk:
            return chunk, (False, PromptRead.NOTHING)
        count = min(chunk, outside + self._read_at_once(paced), left)
        return count, (count == left, PromptRead.GO_ON if begun else PromptRead.BEGIN)

    def _read_at_once(self, paced: int | None) -> int:
        """Count the tokens that a rule reads in one piece. Paced, on a GPU, a power of two, since those are captured,
        and no more than it looks back."""
        if paced is None or not self.on_gpu:
            return READ
        return min(READ, 1 << (max(1, self.window).bit_length() - 1))

    def _waits(self, rows: Sequence[Request], in_slot: Sequence[Request | None]) -> bool:
        """Whether prompts wait for others to be read with. A short one costs about what a step of all slots does, since
        both read all weights; a slot that waits costs its share of a step. Half of what may be saved is risked."""
        running = sum(r is not None and r.asked > 0 for r in in_slot)
        if not self.patient or not running or any(r.fed for r in rows):
            return False
        self._waited += len(rows)
        if 2 * self._waited <= running:
            return True
        self._waited = 0
        return False

    def feed_less(self, portion: Portion) -> bool:
        """Feed fewer prompts at once from now on, then shorter chunks; False: there is nothing shorter."""
        width = max(portion.counts)
        if len(portion.requests) > 1:
            self.pass_tokens = width * (len(portion.requests) // 2)
        elif self.chunk > SMALLEST_CHUNK and width > SMALLEST_CHUNK + self.window:
            self.chunk = max(SMALLEST_CHUNK, self.chunk // 2)
        else:
            return False
        return True
