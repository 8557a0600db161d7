"""The engine on a CPU against the loops that people write: three 8-layer, 512-wide float32 Llamas, 2 threads.

    batch 1                  against the faster of the notebook's loop and the same without its detour
    batch 8, uneven          requests of different lengths, 8 at a time, against batches padded on the left
    adapters                 a base with three LoRA experts against a base and three full models, both by the engine

The two sides take turns, and the median of the ratios of neighbouring turns counts, so that whatever else the machine
does falls on both. Writes results/cpu-decoding.json. Run: python benchmarks/cpu_decoding.py [threads]
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait must not take the cores from others

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from random_models import random_composition
from tessellm.bench.measure import engine_steps, random_prompts
from tessellm.engine.engine import Engine
from tessellm.engine.sampling import Sampling
from tessellm.model import ComposedForCausalLM
from tessellm_lab.common.claims import Claim, Result
from tessellm_lab.common.loops import Loop, loop_steps

RESULTS = Path(__file__).resolve().parent.parent / "results"
SHAPE, PROMPT, NEW, BATCH, REQUESTS = "llama-512", 128, 24, 8, 24


def turns(slow: Callable[[], float], fast: Callable[[], float], rounds: int) -> dict[str, float]:
    """Seconds of both, in turns, and how many times faster the second is."""
    pairs = [(slow(), fast()) for _ in range(rounds)]
    ratios = sorted(one / other for one, other in pairs)
    return {
        "slow_seconds": statistics.median(one for one, _ in pairs),
        "engine_seconds": statistics.median(other for _, other in pairs),
        "ratio": statistics.median(ratios),
        "lowest": ratios[0],
        "highest": ratios[-1],
    }


def padded_seconds(
    model: ComposedForCausalLM, rows: Sequence[Sequence[int]], new: Sequence[int], batch: int, to_cpu: bool = False
) -> float:
    """How long rows take that each want so many new tokens, a padded batch after the other."""
    start = time.perf_counter()
    for first in range(0, len(rows), batch):
        loop = Loop(model, rows[first : first + batch], to_cpu)
        for _ in range(max(new[first : first + batch])):
            loop.step()
    return time.perf_counter() - start


def batch_one(rule: str, rounds: int) -> dict[str, float]:
    model = random_composition(SHAPE, 2, "full", rule)
    rows = random_prompts(model, [PROMPT])
    engine = Engine(model, 1, PROMPT + NEW)

    def loop() -> float:
        return min(loop_steps(model, rows, NEW, to_cpu) for to_cpu in (True, False))

    return turns(loop, lambda: engine_steps(engine, rows, NEW)[1], rounds)


def uneven(rule: str, rounds: int) -> dict[str, float]:
    """Prompts of 16 to 128 tokens that want 8 to 64 more: everything from the first prompt to the last token."""
    model = random_composition(SHAPE, 2, "full", rule)
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(16, 129, (REQUESTS,), generator=generator).tolist()
    new = torch.randint(8, 65, (REQUESTS,), generator=generator).tolist()
    rows = random_prompts(model, lengths)
    engine = Engine(model, BATCH, 128 + 64)

    def by_engine() -> float:
        engine.prefixes.forget()
        start = time.perf_counter()
        engine.generate(rows, [Sampling(count, ignore_end=True) for count in new])
        return time.perf_counter() - start

    found = turns(lambda: padded_seconds(model, rows, new, BATCH), by_engine, rounds)
    return {**found, "tokens_a_second": sum(new) / found["engine_seconds"], "tokens": sum(new)}


def adapters(rule: str, rounds: int) -> dict[str, float]:
    full, lora = (random_composition(SHAPE, 3, kind, rule) for kind in ("full", "lora"))
    engines = [Engine(model, 1, PROMPT + NEW) for model in (full, lora)]
    rows = random_prompts(full, [PROMPT])
    separate, shared = (partial(engine_steps, engine, rows, NEW) for engine in engines)
    return turns(lambda: separate()[1], lambda: shared()[1], rounds)


def main() -> None:
    torch.set_num_threads(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
    start = time.perf_counter()
    tables: dict[str, Any] = {}
    for rule in ("product", "mixture"):
        for name, measure, rounds in (("batch 1", batch_one, 7), ("uneven", uneven, 3), ("adapters", adapters, 7)):
            tables[f"{name}, {rule}"] = measure(rule, rounds)
            print(f"{name}, {rule}: {tables[f'{name}, {rule}']['ratio']:.2f} ×", flush=True)
    wanted = {
        "batch 1": (1.0, "batch 1: the fastest loop's time of a step over the engine's"),
        "uneven": (1.5, "8 at a time, uneven lengths: a padded batch's time for all requests over the engine's"),
        "adapters": (
            2.0,
            "base and 3 experts, batch 1: a step of separate models over one of LoRA on one base",
        ),
    }
    claims = []
    for name, (target, statement) in wanted.items():
        ratio = tables[f"{name}, product"]["ratio"]
        claims.append(Claim(name, f"{statement}, Eq. 2", round(ratio, 3), f"≥ {target}", ratio >= target))
        claims.append(
            Claim(f"{name}, mixture", f"{statement}, default rule", round(tables[f"{name}, mixture"]["ratio"], 3))
        )
    Result("cpu-decoding", claims, 0, "cpu", time.perf_counter() - start, tables=tables).write(RESULTS)


if __name__ == "__main__":
    main()
