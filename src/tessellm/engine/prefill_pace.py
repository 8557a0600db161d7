"""PrefillPace: choose the prefill chunk size so that inter-token latency of running requests stays within a factor of
what it is without prompts, and of what it was. Learnt from how long steps take, and, where a device tells, from what
its forwards take; knows numbers and a clock alone."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Mapping

WITHIN = 2.2  # times as long as a step without prompts, and as the median of the last steps, one with prompts may take
RECENT = 128  # steps of which the median is taken
LEAST, MOST = 4, 256  # tokens per pass
LEAST_ON_GPU, MOST_ON_GPU = 64, 2048  # there fewer take as long; powers of two, which are captured
NEWEST = 0.3  # weight of the last measurement of a step
AT_ONCE = 2.0  # factor by which a pass may become larger or smaller than the one before


class PrefillPace:
    """Watches steps. Passes over prompts grow and shrink until they add as much time as they may."""

    def __init__(self, on_gpu: bool, seconds: Mapping[int, float] | None = None):
        """`seconds` of passes over so many tokens, where the device tells: then nothing need be tried."""
        self.seconds = seconds or {}
        self.least, self.most = (LEAST_ON_GPU, MOST_ON_GPU) if on_gpu else (LEAST, MOST)
        self.tokens, self.on_gpu = self.least, on_gpu
        # on a CPU the thread's own time: what else the machine does is not taken for a cost
        self.clock = time.perf_counter if on_gpu else time.thread_time
        self._step: float | None = None  # seconds of steps without prompts
        self._rest: float | None = None  # seconds of steps with prompts beside what was read, where that can be told
        self._recent: deque[float] = deque(maxlen=RECENT)  # seconds with them and without
        self._began, self._fed, self._read = 0.0, 0, 0.0

    def begin(self) -> None:
        """Note that a step begins."""
        self._began, self._fed, self._read = self.clock(), 0, 0.0

    def feed(self, tokens: int) -> None:
        """Note that the step feeds so many tokens of prompts, padding included."""
        self._fed = tokens

    def fed(self) -> None:
        """Note that they are read: on a GPU that is not known."""
        self._read = 0.0 if self.on_gpu else self.clock() - self._began

    def end(self, decoding: bool) -> None:
        """Learn from the step that ends; `decoding`: others were written to in it."""
        seconds = self.clock() - self._began
        if not decoding:
            return
        self._recent.append(seconds)
        if not self._fed:
            self._step = _follow(self._step, seconds)
        elif self._read:
            self._rest = _follow(self._rest, seconds - self._read)
        step = max(self._step or 0.0, self._rest or 0.0)  # who reads all the time has no other step to go by
        if not step:
            return
        allowed = max(0.0, WITHIN * min(step, statistics.median(self._recent)) - step)
        if self.seconds:
            fitting = [tokens for tokens, took in self.seconds.items() if took <= allowed]
            self.tokens = max(fitting, default=self.least)
        elif self._fed:
            self._learn(allowed / max(self._read or seconds - step, 1e-9))

    def _learn(self, share: float) -> None:
        """Feed more or less from now on. `share`: how much longer than this time it might have taken."""
        if share < 1 or self._fed >= self.tokens // 2:  # a short rest of a prompt tells little
            wanted = max(1, int(self._fed * min(AT_ONCE, max(1 / AT_ONCE, share))))
            wanted = 1 << (wanted.bit_length() - 1) if self.on_gpu else wanted
            self.tokens = max(self.least, min(self.most, wanted))


def _follow(before: float | None, seconds: float) -> float:
    """The mean of steps so far, the last ones most of all."""
    return seconds if before is None else before + NEWEST * (seconds - before)
