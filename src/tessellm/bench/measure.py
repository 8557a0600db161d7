"""What is measured: milliseconds per step, tokens per second, the share of the memory-bandwidth limit, memory.

A step gives every running sequence one token. It has to read every weight once, so it cannot be shorter than the bytes
of all distinct weights over the bandwidth of the memory; that bandwidth is measured, by copying. The engine and a loop
take turns, so that whatever else the machine does falls on both; medians are reported.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..decoding.engine import Engine
from ..decoding.sampling import Sampling
from ..decoding.speculation import Speculation
from ..errors import EngineError
from ..model import ComposedForCausalLM
from .loops import Loop
from .models import TURN

COPIED = {"cuda": 1 << 32, "cpu": 1 << 28}  # bytes


@dataclass(frozen=True)
class Case:
    """One point of a sweep."""

    experts: int
    batch: int = 1
    prompt: int = 128


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def bandwidth(device: torch.device) -> float:
    """Bytes a second that the device's memory moves, reading and writing: the best of a few large copies."""
    source = torch.ones(COPIED.get(device.type, COPIED["cpu"]), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(6):
        synchronise(device)
        start = time.perf_counter()
        target.copy_(source)
        synchronise(device)
        best = min(best, time.perf_counter() - start)
    return 2 * source.nbytes / best


def bytes_a_step(model: ComposedForCausalLM) -> int:
    """Of all distinct weights that a step reads whole. Of a table of input embeddings it reads a few rows."""
    read: dict[int, Tensor] = {}
    for name in model.members:
        member: Any = model.member(name)
        table, output = member.get_input_embeddings(), member.get_output_embeddings()
        tied = output is not None and getattr(output, "weight", None) is table.weight
        read |= {id(p): p for p in member.parameters() if tied or p is not table.weight}
    return sum(parameter.nbytes for parameter in read.values())


def random_prompts(model: ComposedForCausalLM, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    generator, size = torch.Generator().manual_seed(seed), model.config.vocab_size
    first = 3 if size > 3 else 0  # ids before are mostly special tokens
    return [[*torch.randint(first, size, (n - 1,), generator=generator).tolist(), TURN % size] for n in lengths]


class Timed(NamedTuple):
    """Seconds to the first token of all rows, and seconds a step after it; what was written."""

    first: float
    step: float
    texts: list[list[int]]


def engine_steps(engine: Engine, rows: Sequence[Sequence[int]], new: int) -> tuple[float, float]:
    """Seconds to the first token of all rows, and seconds a step after it. Prompts are fed anew."""
    return timed_texts(engine, rows, new)[:2]


def timed_texts(engine: Engine, rows: Sequence[Sequence[int]], new: int) -> Timed:
    """The same, with the texts."""
    engine.prefixes.forget()
    device = engine.model.device
    synchronise(device)
    start = time.perf_counter()
    requests = [engine.submit(row, Sampling(new, ignore_end=True)) for row in rows]
    while not all(request.tokens for request in requests):
        _step(engine)
    before, first = sum(len(r.tokens) for r in requests), time.perf_counter()
    while not all(request.done for request in requests):
        _step(engine)
    synchronise(device)
    steps = (sum(len(r.tokens) for r in requests) - before) / len(rows)
    if not steps:
        raise EngineError(f"all {new} new tokens came before a step could be timed: ask for more of them")
    return Timed(first - start, (time.perf_counter() - first) / steps, [request.tokens for request in requests])


def _step(engine: Engine) -> None:
    """A request that failed writes no more: there is nothing to wait for."""
    for request in engine.step():
        if request.error:
            raise EngineError(request.error)


def loop_steps(model: ComposedForCausalLM, rows: Sequence[Sequence[int]], new: int, to_cpu: bool) -> float:
    """Seconds a step of a loop after its first token."""
    loop = Loop(model, rows, to_cpu)
    loop.step()
    start = time.perf_counter()
    for _ in range(new - 1):
        loop.step()
    return (time.perf_counter() - start) / (new - 1)


def measure(
    model: ComposedForCausalLM,
    case: Case,
    new: int,
    rounds: int,
    bytes_a_second: float,
    compiled: bool,
    loops: bool,
    speculation: Speculation | None = None,
) -> dict[str, Any]:
    """One row of the table, with all members awake at every step. With `speculation` also the same with drafts."""
    device, rows = model.device, random_prompts(model, [case.prompt] * case.batch)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    engine = Engine(model, case.batch, case.prompt + new, compiled=compiled, speculation=Speculation("none"))
    engine_steps(engine, rows, min(new, 8))
    made = time.perf_counter() - start
    drafting, same = None, []
    if speculation is not None:
        drafting = Engine(model, case.batch, case.prompt + new, compiled=compiled, speculation=speculation)
        engine_steps(drafting, rows, new)
    timed: dict[str, list[float]] = {"engine": [], "first": [], "notebook": [], "on device": [], "drafting": []}
    for _ in range(rounds):
        first, step, texts = timed_texts(engine, rows, new)
        timed["first"].append(first)
        timed["engine"].append(step)
        if drafting is not None:
            _, step, others = timed_texts(drafting, rows, new)
            timed["drafting"].append(step)
            same += [one == other for one, other in zip(texts, others, strict=True)]
        if loops:
            short = min(new, 24)
            timed["notebook"].append(loop_steps(model, rows, short, to_cpu=True))
            timed["on device"].append(loop_steps(model, rows, short, to_cpu=False))
    median = {key: statistics.median(values) for key, values in timed.items() if values}
    weights, cache = bytes_a_step(model), sum(group.cache.bytes for group in engine.steps.work.groups)
    limit = weights / bytes_a_second
    row = {
        "experts": case.experts,
        "batch": case.batch,
        "prompt": case.prompt,
        "new_tokens": new,
        "ms_a_step": 1e3 * median["engine"],
        "tokens_a_second": case.batch / median["engine"],
        "limit_ms": 1e3 * limit,
        "share_of_limit": limit / median["engine"],
        "first_token_ms": 1e3 * median["first"],
        "weight_bytes": weights,
        "cache_bytes": cache,
        "peak_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
        "made_seconds": made,
        "compile_seconds": engine.steps.prepared_seconds,
    }
    if drafting is not None:
        row |= _drafted(drafting)
        row["drafting_ms"] = 1e3 * median["drafting"]
        row["times_without_drafts"] = median["engine"] / median["drafting"]
        row["same_texts"] = statistics.mean(same)
    for name in ("notebook", "on device"):
        if name in median:
            row[f"{name.replace(' ', '_')}_ms"] = 1e3 * median[name]
            row[f"times_{name.replace(' ', '_')}"] = median[name] / median["engine"]
    return row


def _drafted(engine: Engine) -> dict[str, Any]:
    """Count an engine's drafts: tokens tried, and the share of them that all members would have written."""
    assert engine.speculator is not None
    drafted, accepted = engine.speculator.drafted, engine.speculator.accepted
    return {"drafted": drafted, "accepted": accepted / max(1, drafted)}


def sweep(
    make: Callable[[int], ComposedForCausalLM],
    cases: Sequence[Case],
    new: int = 64,
    rounds: int = 3,
    compiled: bool = True,
    loops: bool = True,
    speculation: Speculation | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Every case, with the bandwidth measured in the same run. `make` gives the composition with so many experts."""
    rows: list[dict[str, Any]] = []
    speed, model, experts = None, None, None
    for case in cases:
        if experts != case.experts:
            model, experts = make(case.experts), case.experts
        assert model is not None
        if speed is None:
            speed = bandwidth(model.device)
            progress(f"memory moves {speed / 1e9:,.1f} GB/s")
        row = measure(model, case, new, rounds, speed, compiled, loops, speculation)
        rows.append(row)
        progress(in_words(row))
    return {"bytes_a_second": speed, "rule": model.rule.name if model is not None else None, "rows": rows}


def in_words(row: dict[str, Any]) -> str:
    """A row as a line."""
    text = (
        f"{row['experts']} experts, batch {row['batch']}, prompt {row['prompt']}: {row['ms_a_step']:.2f} ms a step, "
        f"{row['tokens_a_second']:,.0f} tokens/s, {row['share_of_limit']:.0%} of the limit"
    )
    text += f", {row['times_notebook']:.1f} × the notebook loop" if "times_notebook" in row else ""
    if "times_without_drafts" in row:
        text += (
            f", {row['times_without_drafts']:.2f} × with drafts ({row['accepted']:.0%} of {row['drafted']:,} tokens "
        )
        text += f"accepted, {row['same_texts']:.0%} of the texts the same)"
    return text
