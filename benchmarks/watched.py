"""An engine that is watched while it is timed, for speculation.py."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from tessellm.engine.engine import Engine
from tessellm.engine.requests import Request
from tessellm.engine.sampling import Sampling


@dataclass
class Watched:
    """An engine, and what its timed runs did: seconds, passes, and what the device was given."""

    engine: Engine
    seconds: list[float] = field(default_factory=list)
    busy: float = 0.0
    steps: int = 0

    def __post_init__(self) -> None:
        """Note what every replayed graph keeps the device busy for."""
        inner = getattr(self.engine.executor, "_replay", None)
        if inner is None:
            return

        def replay(name: str, run: Any, *shape: Any) -> None:
            inner(name, run, *shape)
            self.busy += self.graph_seconds[name, *shape]

        self.engine.executor._replay = replay  # type: ignore[attr-defined]

    @property
    def graph_seconds(self) -> dict[tuple[Any, ...], float]:
        """The device's seconds per captured pass; none on a CPU."""
        return getattr(self.engine.executor, "graph_seconds", {})

    def clock(self) -> float:
        """On a CPU the seconds of its one thread, whatever else the machine does."""
        return time.process_time() if self.engine.model.device.type == "cpu" else time.perf_counter()

    def run(self, prompts: list[list[int]], asked: Any) -> list[Request]:
        """One run through the engine."""
        before = self.clock()
        self.engine.prefixes.forget()
        requests = [self.engine.submit(prompt, each) for prompt, each in zip(prompts, asked, strict=True)]
        while not all(request.done for request in requests):
            self.engine.step()
            self.steps += 1
        self.seconds.append(self.clock() - before)
        return requests

    def decoding(self, prompts: list[list[int]], asked: Sampling) -> float:
        """Tokens a second after prompts were read; as many prompts at a time as there are slots."""
        seconds, written, slots = 0.0, 0, len(self.engine.in_slot)
        for first in range(0, len(prompts), slots):
            self.engine.prefixes.forget()
            requests = [self.engine.submit(prompt, asked) for prompt in prompts[first : first + slots]]
            while not all(request.tokens for request in requests):
                self.engine.step()
            start, before = self.clock(), sum(len(request.tokens) for request in requests)
            while not all(request.done for request in requests):
                self.engine.step()
            seconds += self.clock() - start
            written += sum(len(request.tokens) for request in requests) - before
        return written / seconds

    def forget(self) -> None:
        self.seconds, self.busy, self.steps = [], 0.0, 0

    def told(self) -> dict[str, float]:
        """Milliseconds a step of the engine, prompts included; of those, what graphs kept the device busy for."""
        found = {"ms_a_step": 1e3 * sum(self.seconds) / self.steps, "steps_a_run": self.steps / len(self.seconds)}
        return {**found, "graphs_ms_a_step": 1e3 * self.busy / self.steps} if self.busy else found
