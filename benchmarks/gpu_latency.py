"""The first token and the first minute on one GPU: google/gemma-2-2b's shapes, random weights, bfloat16.

    python benchmarks/gpu_latency.py                                            meant for five minutes of an H200
    python benchmarks/gpu_latency.py --device cpu --shapes gemma-tiny --quick   the same in small, to see that it runs

Each case is a process: from its start to ready, with kernels still to be compiled and with kernels on disk; the next 8
tokens; 10,000 steps at batches 1 to 32 and what was compiled or captured meanwhile; the time to the first token; gaps
under Poisson arrivals at half and at 80 % of the throughput. Written to results/gpu-latency.json as soon as each is
there; what does not begin within --seconds is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from reference_overhead import RESULTS
from tessellm.bench.latency import LIMIT, spread
from tessellm.bench.measure import random_prompts, synchronise
from tessellm.bench.models import random_composition
from tessellm.decoding.engine import Engine
from tessellm.decoding.preparation import prepare
from tessellm.decoding.requests import Request
from tessellm.decoding.sampling import Sampling
from tessellm.experiments.lab.claims import Claim, Result, at_least, at_most

NAME = "gpu-latency"
FIRST = {"full": 8.0, "lora": 5.0}  # ms to the first token of a prompt of 128, at most
EXPERTS = {"full": 2, "lora": 3}
LOADS = (0.5, 0.8)


@dataclass(frozen=True)
class Case:
    """A process: which composition, and whether its kernels are on disk already."""

    kind: str
    rule: str
    cache: str  # cold, or warm

    @property
    def name(self) -> str:
        return f"{self.kind} {self.rule} {self.cache}"


CASES = [
    Case("lora", "belief", "cold"),
    Case("lora", "belief", "warm"),
    Case("full", "belief", "warm"),
    Case("full", "product", "warm"),
    Case("lora", "product", "warm"),
    Case("full", "evidence", "warm"),
    Case("lora", "evidence", "warm"),
]


class Run:
    """One case, in its own process."""

    def __init__(self, case: Case, given: argparse.Namespace):
        self.quick, self.device = given.quick, torch.device(given.device)
        self.slots, self.context = (4, 256) if given.quick else (32, 4096)
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        kind = EXPERTS[case.kind], case.kind, case.rule, given.device, dtype
        self.model = random_composition(given.shapes, *kind)
        loaded = time.time() - given.began
        self.engine = Engine(self.model, self.slots, self.context)
        self.prepared = prepare(self.engine)
        self.engine.schedule.keep_pace()
        self.found: dict[str, Any] = {
            "loaded_seconds": loaded,
            "ready_beyond_loading_seconds": time.time() - given.began - loaded,
            "prepare_seconds": self.prepared.seconds,
            "compiled_or_captured": self.prepared.made,
        }

    def all(self) -> dict[str, Any]:
        long = self.context // 2
        self.found["first_8_tokens_ms"] = self.first_tokens(8)
        self.found["first_token_ms"] = {str(n): self.first_token(n) for n in (32, 128, long)}
        self.found["long_prompt_share_of_matrix_rate"] = self.matrix_share(long)
        self.found["steps"] = self.steps(60 if self.quick else 10_000)
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
        times = []
        for turn in range(9):
            self.engine.prefixes.forget()
            synchronise(self.device)
            start = time.perf_counter()
            self.engine.generate(random_prompts(self.model, [length], turn), Sampling(1))
            times.append(1e3 * (time.perf_counter() - start))
        return statistics.median(times)

    def matrix_share(self, length: int) -> float:
        """Of the rate at which the device multiplies matrices, what reading a long prompt reaches."""
        size = 512 if self.quick else 8192
        one = torch.randn(size, size, dtype=self.model.dtype, device=self.device)
        best = float("inf")
        for _ in range(8):
            synchronise(self.device)
            start = time.perf_counter()
            one @ one
            synchronise(self.device)
            best = min(best, time.perf_counter() - start)
        needed = 2 * length * sum(map(_multiplied, map(self.model.member, self.model.members)))
        return needed / (1e-3 * self.found["first_token_ms"][str(length)]) / (2 * size**3 / best)

    def steps(self, total: int) -> dict[str, Any]:
        """Milliseconds of steps at each batch, without prompts."""
        batches = [1 << n for n in range((self.slots).bit_length()) if 1 << n <= self.slots]
        new, found = min(800, self.context - 130), {}
        for batch in batches:
            times: list[float] = []
            while len(times) < total // len(batches):
                requests = [
                    self.engine.submit(row, Sampling(new, ignore_end=True))
                    for row in random_prompts(self.model, [128] * batch, len(times))
                ]
                while not all(request.tokens for request in requests):
                    self.engine.step()
                self.engine.step()
                while all(request.asked < new - 1 for request in requests):
                    start = time.perf_counter()
                    self.engine.step()
                    times.append(1e3 * (time.perf_counter() - start))
                while self.engine.busy:
                    self.engine.step()
            middle = statistics.median(times)
            above = sum(each > LIMIT * middle for each in times)
            found[str(batch)] = {"steps": len(times), "median": middle, "largest": max(times), "above": above}
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
        began = time.perf_counter()
        while len(came) < count or self.engine.busy:
            now = time.perf_counter() - began
            while len(came) < count and due[len(came)] <= now:
                sent.append(due[len(came)])
                came[self.engine.submit(rows[len(came)], Sampling(16 if self.quick else 96, ignore_end=True))] = []
            for request in self.engine.step():
                came[request] += [time.perf_counter() - began] * (len(request.tokens) - len(came[request]))
        return _felt(list(came.values()), sent), count / (time.perf_counter() - began)


def _multiplied(member: Any) -> int:
    """Numbers of a member by which every token of a prompt is multiplied: its output layer reads the last few alone."""
    outside = ("embed_tokens", "lm_head")
    return sum(each.numel() for name, each in member.named_parameters() if not any(part in name for part in outside))


def _felt(came: Sequence[Sequence[float]], sent: Sequence[float]) -> dict[str, Any]:
    gaps = spread([after - before for times in came for before, after in pairwise(times)])
    first = spread([times[0] - start for times, start in zip(came, sent, strict=True)])
    return {"first_token_ms": first, "gap_ms": gaps, "p99_over_median": gaps["p99"] / gaps["median"]}


def claims(found: dict[str, dict[str, Any]]) -> list[Claim]:
    made: list[Claim] = []
    for name, case in found.items():
        kind, _, cache = name.split()
        ready = round(case["ready_beyond_loading_seconds"], 1)
        what = f"{name}: seconds from loaded weights to ready"
        made.append(
            at_most(f"ready-{name}", what, ready, 20) if cache == "warm" else Claim(f"ready-{name}", what, ready)
        )
        if "late" not in case:
            continue
        above = sum(batch["above"] for batch in case["steps"].values())
        steps = sum(batch["steps"] for batch in case["steps"].values())
        first = round(case["first_token_ms"]["128"], 2)
        share, over = round(case["long_prompt_share_of_matrix_rate"], 3), round(case["load_0.8"]["p99_over_median"], 2)
        made += [
            at_most(f"late-{name}", f"{name}: compilations and captures after ready", case["late"], 0),
            at_most(f"steps-{name}", f"{name}: of {steps:,} steps, those above {LIMIT:g} medians", above, 0),
            at_most(f"first-{name}", f"{name}: ms to the first token, prompt 128", first, FIRST[kind]),
            at_least(f"long-{name}", f"{name}: a long prompt, share of the matrix rate", share, 0.5),
            at_most(f"gaps-{name}", f"{name}: 80 % load, 99 % of gaps over the median", over, LIMIT),
        ]
    return made


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shapes", default="gemma-2-2b")
    parser.add_argument("--quick", action="store_true", help="few steps")
    parser.add_argument("--seconds", type=float, default=200, help="after which no other case begins")
    parser.add_argument("--case", help="one case in this process (the script itself asks for that)")
    parser.add_argument("--began", type=float, default=time.time())
    return parser.parse_args()


def run_case(case: Case, given: argparse.Namespace, cache: str) -> dict[str, Any]:
    """A process of its own; its last line is what it found."""
    folders = {name: f"{cache}/{name}" for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    command = [sys.executable, __file__, "--device", given.device, "--shapes", given.shapes, "--case", case.name]
    command += ["--began", str(time.time()), *(["--quick"] if given.quick else [])]
    ran = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **folders})
    if ran.returncode:
        raise RuntimeError(ran.stderr.strip()[-2000:])
    found: dict[str, Any] = json.loads(ran.stdout.strip().splitlines()[-1])
    return found


def main() -> None:
    given = arguments()
    disable_progress_bar()
    if given.case:
        case = Case(*given.case.split())
        run = Run(case, given)
        print(json.dumps(run.found if case.cache == "cold" else run.all()))
        return
    start, found, failed = time.perf_counter(), {}, {}
    with tempfile.TemporaryDirectory() as cache:
        for case in CASES:
            if time.perf_counter() - start > given.seconds:
                print(f"{case.name}: no time is left")
                continue
            try:
                found[case.name] = run_case(case, given, cache)
            except RuntimeError as error:
                failed[case.name] = str(error)
                print(f"{case.name} failed: {error}")
            seconds = round(time.perf_counter() - start, 1)
            size = "cpu" if given.device == "cpu" else "full"
            result = Result(NAME, claims(found), 0, size, seconds, tables={"cases": found, "failed": failed})
            result.write(RESULTS)
            print(f"{case.name}: {json.dumps(found.get(case.name))}", flush=True)
    for claim in result.claims:
        print(f"{claim.statement}: {claim.value}" + (f" (target {claim.target})" if claim.target else ""))


if __name__ == "__main__":
    main()
