"""PrefillController: which prompts are read next and how much of each, so that others go on while a long one is read.

Prompts are read in chunks, several at a time, in the order in which they came. For people who watch (`keep_pace`),
chunks are so short that running requests hardly notice. When memory runs out, fewer are read at once, then in shorter
chunks. Knows token ids, slots and branches; executors compute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .prefill_pace import PrefillPace
from .prefixes import Copy, Prefixes
from .requests import Branch, Request

CHUNK = 256  # tokens of a branch that are read at once
PASS_TOKENS = 2048  # tokens of one forward, padding included
CHUNK_ON_GPU = 2048  # there, starting the kernels of a forward takes as long as computing so many
PASS_TOKENS_ON_GPU = 4096
MOST_PADDED = 1.5  # padded tokens of a forward over its real ones
SMALLEST_CHUNK = 16


@dataclass(frozen=True)
class PromptPart:
    """The next tokens of one branch's prompt."""

    request: Request
    slot: int
    member: int
    count: int

    @property
    def branch(self) -> Branch:
        return self.request.branches[self.member]

    @property
    def tokens(self) -> list[int]:
        return self.request.prompt[self.branch.computed : self.branch.computed + self.count]

    @property
    def is_last(self) -> bool:
        return self.branch.computed + self.count == len(self.request.prompt)


@dataclass(frozen=True)
class Chunk:
    """What one forward reads."""

    parts: list[PromptPart]

    @property
    def is_last(self) -> bool:
        """Whether all parts are the ends of their prompts."""
        return all(part.is_last for part in self.parts)

    def padded(self) -> tuple[Tensor, Tensor]:
        """Lay out tokens and positions, padded on the left with tokens of the same row: [B, width]."""
        tokens, positions, width = [], [], max(part.count for part in self.parts)
        for part in self.parts:
            own, start = part.tokens, part.branch.computed
            tokens.append(own[:1] * (width - part.count) + own)
            positions.append([-1] * (width - part.count) + list(range(start, start + part.count)))
        return torch.tensor(tokens), torch.tensor(positions)


class PrefillController:
    """Chooses what each forward reads of the prompts in the slots."""

    def __init__(self, prefixes: Prefixes, on_gpu: bool, padded: bool):
        """`padded`: rows of a forward are padded to the longest, and all of them or none are ends of prompts."""
        self.prefixes, self.padded = prefixes, padded
        self.chunk = CHUNK_ON_GPU if on_gpu else CHUNK  # less when memory runs out
        self.pass_tokens = PASS_TOKENS_ON_GPU if on_gpu else PASS_TOKENS
        self.on_gpu = self.patient = on_gpu  # there one prompt costs what several do
        self.pace: PrefillPace | None = None
        self._waited = 0  # steps that prompts have waited, summed over prompts

    def keep_pace(self, seconds: Mapping[int, float] | None = None) -> None:
        """Bound the inter-token latency of running requests by the chunk size. `seconds` of forwards over so many
        tokens, where they are known."""
        self.pace = PrefillPace(self.on_gpu, seconds)

    def next(self, in_slot: Sequence[Request | None], queued: bool, copy: Copy) -> Chunk | None:
        """Choose what to read now; `queued`: others wait for a slot. Beginnings that a row holds are copied."""
        rows = {slot: r for slot, r in enumerate(in_slot) if r is not None and not r.scheduled}
        rows = {slot: r for slot, r in rows.items() if not self.prefixes.waits(r, in_slot)}
        if not rows or (queued and self._waits(list(rows.values()), in_slot)):
            return None
        paced = self.pace.tokens if self.pace and any(r is not None and r.scheduled for r in in_slot) else None
        most = self.pass_tokens if paced is None else min(paced, self.pass_tokens)
        parts: list[PromptPart] = []
        for slot, request in sorted(rows.items(), key=lambda row: row[1].number):
            for member, branch in request.branches.items():
                if not branch.computed:
                    self.prefixes.reuse(request, branch, slot, member, copy)
                left = len(request.prompt) - branch.computed
                count = min(left, self.chunk, paced or left)
                if not self.padded and parts:
                    count = min(count, most - sum(part.count for part in parts))
                part = PromptPart(request, slot, member, count)
                if count > 0 and (not parts or self._fits(part, parts, most)):
                    parts.append(part)
        if self.pace is not None:
            self.pace.feed(self._tokens(parts))
        return Chunk(parts)

    def _tokens(self, parts: Sequence[PromptPart]) -> int:
        counts = [part.count for part in parts]
        return max(counts) * len(counts) if self.padded else sum(counts)

    def _fits(self, part: PromptPart, parts: Sequence[PromptPart], most: int) -> bool:
        if not self.padded:
            return True
        tokens = self._tokens([*parts, part])
        real = part.count + sum(each.count for each in parts)
        return part.is_last == parts[0].is_last and tokens <= min(most, MOST_PADDED * real)

    def _waits(self, rows: Sequence[Request], in_slot: Sequence[Request | None]) -> bool:
        """Whether prompts wait for others to be read with. A short one costs about what a step of all slots does, since
        both read all weights; a slot that waits costs its share of a step. Half of what may be saved is risked."""
        running = sum(r is not None and r.scheduled > 0 for r in in_slot)
        begun = any(branch.computed for r in rows for branch in r.branches.values())
        if not self.patient or not running or begun:
            return False
        self._waited += len(rows)
        if 2 * self._waited <= running:
            return True
        self._waited = 0
        return False

    def read_less(self, chunk: Chunk) -> bool:
        """Read fewer prompts at once from now on, then shorter chunks; False: there is nothing shorter."""
        width = max(part.count for part in chunk.parts)
        if len(chunk.parts) > 1:
            self.pass_tokens = width * (len(chunk.parts) // 2)
        elif self.chunk > SMALLEST_CHUNK and width > SMALLEST_CHUNK:
            self.chunk = max(SMALLEST_CHUNK, self.chunk // 2)
        else:
            return False
        return True
