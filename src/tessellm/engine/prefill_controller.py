"""PrefillController: which prompts are read next and how much of each, so that others go on while a long one is read.

Prompts are read in chunks, several at a time, in the order in which they came. For people who watch (`keep_pace`),
chunks are so short that running requests hardly notice: the chunk size bounds the inter-token latency, and is learnt
from how long steps take. When memory runs out, fewer are read at once, then in shorter chunks. Knows token ids, slots,
branches and a clock; executors compute.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .prefixes import Copy, Prefixes
from .requests import Branch, Request

CHUNK = 256  # tokens of a branch that are read at once
PASS_TOKENS = 2048  # tokens of one forward, padding included
CHUNK_ON_GPU = 2048  # there, starting the kernels of a forward takes as long as computing so many
PASS_TOKENS_ON_GPU = 4096
MOST_PADDED = 1.5  # padded tokens of a forward over its real ones
SMALLEST_CHUNK = 16
WITHIN = 2.2  # times as long as a step without prompts, and as the median of the last steps, one with prompts may take
RECENT = 128  # steps of which the median is taken
LEAST, MOST = 4, 256  # tokens of a paced chunk
LEAST_ON_GPU, MOST_ON_GPU = 64, 2048  # there fewer take as long; powers of two, which are captured
NEWEST = 0.3  # weight of the last measurement of a step
AT_ONCE = 2.0  # factor by which a chunk may become larger or smaller than the one before
MEASURED = 16  # steps with prompts in a row, after which one goes without, to be measured
ALIKE = 0.25  # share by which the rows of steps may differ that take about as long


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
        if paced and self.pace and self.pace.due:
            return None
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


class PrefillPace:
    """Watches steps. Chunks grow and shrink until they add as much time as they may."""

    def __init__(self, on_gpu: bool, seconds: Mapping[int, float] | None = None):
        """`seconds` of chunks of so many tokens, where the device tells: then nothing need be tried."""
        self.seconds = seconds or {}
        self.least, self.most = (LEAST_ON_GPU, MOST_ON_GPU) if on_gpu else (LEAST, MOST)
        self.tokens, self.on_gpu = self.least, on_gpu
        # on a CPU the thread's own time: what else the machine does is not taken for a cost
        self.clock = time.perf_counter if on_gpu else time.thread_time
        self._steps: dict[int, float] = {}  # seconds of steps without prompts, by rows
        self._recent: deque[float] = deque(maxlen=RECENT)  # seconds with them and without
        self._began, self._fed, self._in_a_row, self._rows = 0.0, 0, 0, 0

    @property
    def due(self) -> bool:
        """Whether the next step should go without prompts, to be measured: on a CPU, whose forwards read prompts and
        decode together."""
        known = self._nearest()
        unlike = known is None or abs(known - self._rows) > ALIKE * self._rows
        return not self.on_gpu and (unlike or self._in_a_row >= MEASURED)

    def _nearest(self) -> int | None:
        """Return the number of rows, of those measured, that is nearest to this step's."""
        return min(self._steps, key=lambda rows: (abs(rows - self._rows), rows), default=None)

    def begin(self, rows: int = 0) -> None:
        """Note that a step begins which decodes so many rows."""
        self._began, self._fed, self._rows = self.clock(), 0, 0 if self.on_gpu else rows

    def feed(self, tokens: int) -> None:
        """Note that the step feeds so many tokens of prompts, padding included."""
        self._fed = tokens

    def end(self, decoding: bool) -> None:
        """Learn from the step that ends; `decoding`: running requests got tokens in it."""
        seconds = self.clock() - self._began
        if not decoding:
            return
        self._recent.append(seconds)
        self._in_a_row = self._in_a_row + 1 if self._fed else 0
        if not self._fed:
            before = self._steps.get(self._rows, seconds)
            self._steps[self._rows] = before + NEWEST * (seconds - before)
        nearest = self._nearest()
        if nearest is None:
            return
        step = self._steps[nearest]
        allowed = max(0.0, WITHIN * min(step, statistics.median(self._recent)) - step)
        if self.seconds:
            fitting = [tokens for tokens, took in self.seconds.items() if took <= allowed]
            self.tokens = max(fitting, default=self.least)
        elif self._fed:
            self._learn(allowed / max(seconds - step, 1e-9))

    def _learn(self, share: float) -> None:
        """Feed more or less from now on. `share`: how much longer than this time it might have taken."""
        if share < 1 or self._fed >= self.tokens // 2:  # a short rest of a prompt tells little
            wanted = max(1, int(self._fed * min(AT_ONCE, max(1 / AT_ONCE, share))))
            wanted = 1 << (wanted.bit_length() - 1) if self.on_gpu else wanted
            self.tokens = max(self.least, min(self.most, wanted))
