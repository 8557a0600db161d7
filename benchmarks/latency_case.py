"""One case of gpu_latency.py, in a process of its own: a composition under a rule, prepared as a server prepares it."""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from random_models import random_composition
from server_latency import LIMIT, spread
from tessellm.bench.measure import random_prompts, synchronise
from tessellm.engine.engine import Engine
from tessellm.engine.prefill_controller import Chunk
from tessellm.engine.preparation import prepare
from tessellm.engine.requests import Request
from tessellm.engine.sampling import Sampling

EXPERTS = {"full": 2, "lora": 3}
LOADS = (0.5, 0.8)
MOST_SECONDS = 12.0  # of steps at one batch


@dataclass(frozen=True)
class Case:
    """A process: which composition, and whether its kernels are on disk already."""

    kind: str
    rule: str
    cache: str  # cold, or warm

    @property
    def name(self) -> str:
        return f"{self.kind} {self.rule} {self.cache}"


class Run:
    """One case, in its own process."""

    def __init__(self, case: Case, given: argparse.Namespace):
        self.quick, self.device, self.wanted_steps = given.quick, torch.device(given.device), given.steps
        self.slots, self.context = (4, 256) if given.quick else (32, 4096)
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        kind = EXPERTS[case.kind], case.kind, case.rule, given.device, dtype
        self.model = random_composition(given.shapes, *kind, layers=given.layers)
        loaded = time.time() - given.began
        gc.freeze()  # here and below as the server does
        self.engine = Engine(self.model, self.slots, self.context)
        self.prepared = prepare(self.engine)
        self.engine.controller.keep_pace(self.engine.executor.chunk_seconds())
        gc.collect()
        gc.freeze()
        self.found: dict[str, Any] = {
            "loaded_seconds": loaded,
            "ready_beyond_loading_seconds": time.time() - given.began - loaded,
            "prepare_seconds": self.prepared.seconds,
            "compiled_or_captured": self.prepared.made,
            "prepared_by": self.prepared_by(),
        }

    def all(self) -> dict[str, Any]:
        long = self.context // 2
        self.found["first_8_tokens_ms"] = self.first_tokens(8)
        self.found["first_token_ms"] = {str(n): self.first_token(n) for n in (32, 128, long)}
        seconds, members = 1e-3 * self.found["first_token_ms"][str(long)], map(self.model.member, self.model.members)
        rate = matrix_rate(self.device, self.model.dtype, 512 if self.quick else 8192)
        self.found["long_prompt_share_of_matrix_rate"] = 2 * long * sum(map(multiplied, members)) / seconds / rate
        self.found["steps"] = self.steps(60 if self.quick else self.wanted_steps)
        rate = self.served(None)[1]
        self.found["requests_per_second"] = rate
        for load in LOADS:
            self.found[f"load_{load:g}"] = self.served(rate * load)[0]
        self.found["late"] = self.prepared.late
        return self.found

    def first_tokens(self, new: int) -> float:
        """Milliseconds that the next tokens after ready take."""
        start = time.perf_counter()
        self.engine.generate(random_prompts(self.model, [128]), Sampling(new, ignore_end=True))
        return 1e3 * (time.perf_counter() - start)

    def first_token(self, length: int) -> float:
        return first_token_ms(self.engine, length)

    def prepared_by(self) -> dict[str, float]:
        """Seconds of preparation by kind of pass, and the slowest passes."""
        took: dict[tuple[Any, ...], float] = getattr(self.engine.executor, "capture_seconds", {})
        kinds = sorted({(str(key[0]), key[-1].name) for key in took})
        found = {
            f"{name} {choice}": sum(s for key, s in took.items() if (key[0], key[-1].name) == (name, choice))
            for name, choice in kinds
        }
        slowest = sorted(took, key=lambda key: -took[key])[:12]
        return found | {" ".join(map(str, key)): took[key] for key in slowest}

    def steps(self, total: int) -> dict[str, Any]:
        """Milliseconds of steps at each batch, without prompts. Where members rest, a step brings a whole draft: each
        is compared with those of drafts that are as long."""
        batches = [1 << n for n in range((self.slots).bit_length()) if 1 << n <= self.slots]
        new, found, drafted = min(900, self.context - 130), {}, drafts_of(self.engine)
        for batch in batches:
            times: list[float] = []
            by_draft: dict[int, list[float]] = defaultdict(list)
            stop = time.monotonic() + MOST_SECONDS
            while len(times) < total // len(batches) and time.monotonic() < stop:
                requests = [
                    self.engine.submit(row, Sampling(new, ignore_end=True))
                    for row in random_prompts(self.model, [128] * batch, len(times))
                ]
                while not all(request.tokens for request in requests):
                    self.engine.step()
                self.engine.step()
                while all(request.scheduled < new - 1 for request in requests) and time.monotonic() < stop:
                    drafted.clear()
                    start = time.perf_counter()
                    self.engine.step()
                    times.append(1e3 * (time.perf_counter() - start))
                    by_draft[sum(drafted)].append(times[-1])
                for request in requests:
                    self.engine.cancel(request)
                while self.engine.busy:
                    self.engine.step()
            above = sum(each > LIMIT * statistics.median(own) for own in by_draft.values() for each in own)
            found[str(batch)] = {
                "steps": len(times),
                "median": statistics.median(times),
                "largest": max(times),
                "above": above,
                "by_draft": {length: [len(own), statistics.median(own), max(own)] for length, own in by_draft.items()},
            }
        return found

    def served(self, rate: float | None) -> tuple[dict[str, Any], float]:
        """Requests that come at that rate, or all at once: their first tokens and gaps, and requests per second."""
        draw, count = random.Random(0), 8 if self.quick else 96
        most = (16, 32) if self.quick else (32, 64, 128, 512)
        rows = random_prompts(self.model, [most[n % len(most)] for n in range(count)], 7)
        waits = [0.0 if rate is None else draw.expovariate(rate) for _ in rows]
        due = [sum(waits[: n + 1]) for n in range(count)]
        self.engine.prefixes.forget()
        came: dict[Request, list[float]] = {}
        sent: list[float] = []
        steps = StepLog(self.engine)
        began = time.perf_counter()
        while len(came) < count or self.engine.busy:
            now = time.perf_counter() - began
            while len(came) < count and due[len(came)] <= now:
                sent.append(due[len(came)])
                came[self.engine.submit(rows[len(came)], Sampling(16 if self.quick else 96, ignore_end=True))] = []
            for request in steps.step():  # what comes together is one piece of a stream
                came[request].append(time.perf_counter() - began)
        found = _felt(list(came.values()), sent) | {"slowest_steps": steps.slowest(20)}
        return found, count / (time.perf_counter() - began)


class StepLog:
    """Runs steps, and notes of each how long it took and what was in it."""

    def __init__(self, engine: Engine):
        self.engine, self.noted, self.now = engine, list[dict[str, Any]](), dict[str, Any]()
        for owner, name in (
            (engine, "_copy_cells"),
            (engine, "_admit"),
            (engine.controller, "next"),
            (engine.executor, "prefill"),
        ):
            self._watch(owner, name)

    def _watch(self, owner: Any, name: str) -> None:
        """Count the host's milliseconds in a method, and note what of prompts is fed."""
        run, what = getattr(type(owner), name).__get__(owner), f"{name.strip('_')} ms"

        def watched(*given: Any, **named: Any) -> Any:
            start = time.perf_counter()
            found = run(*given, **named)
            self.now[what] = self.now.get(what, 0.0) + 1e3 * (time.perf_counter() - start)
            if isinstance(found, Chunk):
                self.now |= {"fed": [part.count for part in found.parts], "last": found.is_last}
            return found

        setattr(owner, name, watched)

    def step(self) -> list[Request]:
        self.now, start = {"running": sum(each is not None for each in self.engine.in_slot)}, time.perf_counter()
        told = self.engine.step()
        self.noted.append({"ms": 1e3 * (time.perf_counter() - start), **self.now})
        return told

    def slowest(self, most: int) -> list[dict[str, Any]]:
        rounded = ({key: round(x, 2) if isinstance(x, float) else x for key, x in each.items()} for each in self.noted)
        return sorted(rounded, key=lambda each: -each["ms"])[:most]


def drafts_of(engine: Engine) -> list[int]:
    """A list to which each pass that verifies drafts adds how long they were."""
    lengths: list[int] = []
    run: Any = engine.executor.run_verify

    def noted(rows: int, length: int, *given: Any) -> None:
        lengths.append(length)
        run(rows, length, *given)

    engine.executor.run_verify = noted
    return lengths


def first_token_ms(engine: Engine, length: int, rounds: int = 9) -> float:
    """Milliseconds to the first token of a prompt of so many tokens, none of them read before."""
    times = []
    for turn in range(rounds):
        engine.prefixes.forget()
        synchronise(engine.model.device)
        start = time.perf_counter()
        engine.generate(random_prompts(engine.model, [length], turn), Sampling(1))
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def matrix_rate(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Operations a second at which the device multiplies square matrices."""
    one = torch.randn(size, size, dtype=dtype, device=device)
    best = float("inf")
    for _ in range(8):
        synchronise(device)
        start = time.perf_counter()
        one @ one
        synchronise(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def multiplied(member: Any) -> int:
    """Numbers of a member by which every token of a prompt is multiplied: its output layer reads the last few alone."""
    outside = ("embed_tokens", "lm_head")
    return sum(each.numel() for name, each in member.named_parameters() if not any(part in name for part in outside))


def _felt(came: Sequence[Sequence[float]], sent: Sequence[float]) -> dict[str, Any]:
    gaps = spread([after - before for times in came for before, after in pairwise(times)])
    first = spread([times[0] - start for times, start in zip(came, sent, strict=True)])
    return {"first_token_ms": first, "gap_ms": gaps, "p99_over_median": gaps["p99"] / gaps["median"]}
