"""What is measured: milliseconds per step, tokens per second, the share of the memory-bandwidth limit, memory.

A step gives every running sequence one token. It has to read every weight once, so it cannot be shorter than the bytes
of all distinct weights over the bandwidth of the memory; that bandwidth is measured, by copying. A composition and
what it is compared with take turns, so that whatever else the machine does falls on both; medians are reported.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..engine.engine import Engine
from ..engine.sampling import Sampling
from ..engine.speculation import Speculation
from ..errors import EngineError
from ..members.packed import PackedLinear, is_packed
from ..model import ComposedForCausalLM
from ..model.variants import alone, is_alone
from .peers import Speed, peers

COPIED = {"cuda": 1 << 32, "cpu": 1 << 28}  # bytes
MOST = 1 << 20  # of anything: no machine takes more
TURN = 5  # the token that random prompts end with: a template's last token, as prompts end in a chat


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
    """Of all distinct weights that a step of few rows reads whole: packs where there are some. Of a table of input
    embeddings it reads a few rows."""
    read: dict[int, Tensor] = {}
    for name in model.members:
        member: Any = model.member(name)
        table, output = member.get_input_embeddings(), member.get_output_embeddings()
        tied = output is not None and getattr(output, "weight", None) is table.weight
        read |= {id(p): p for p in member.parameters() if tied or p is not table.weight}
        for packed in (module for module in member.modules() if isinstance(module, PackedLinear)):
            read |= {id(each): each for each in (packed.packed, packed.scale)}
            read.pop(id(packed.weight), None)
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


def engine_steps(engine: Engine, rows: Sequence[Sequence[int]], new: int) -> Speed:
    """Seconds to the first token of all rows, and seconds a step after it. Prompts are fed anew."""
    return Speed(*timed_texts(engine, rows, new)[:2])


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


def measure(
    model: ComposedForCausalLM,
    batch: int,
    prompt: int,
    new: int,
    rounds: int,
    bytes_a_second: float,
    speculation: Speculation | None = None,
    beside: Mapping[str, Callable[[], Speed]] | None = None,
) -> dict[str, Any]:
    """One row of the table: the engine without drafts. In turns with it, with `speculation` also the engine with
    drafts, and what stands in `beside`."""
    device, rows, beside = model.device, random_prompts(model, [prompt] * batch), beside or {}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    engine = Engine(model, batch, prompt + new, speculation=Speculation("none"))
    engine_steps(engine, rows, min(new, 8))
    made = time.perf_counter() - start
    drafting, same = None, []
    if speculation is not None:
        drafting = Engine(model, batch, prompt + new, speculation=speculation)
        engine_steps(drafting, rows, new)
    timed: dict[str, list[float]] = {name: [] for name in ("engine", "first", "drafting", *beside)}
    for _ in range(rounds):
        first, step, texts = timed_texts(engine, rows, new)
        timed["first"].append(first)
        timed["engine"].append(step)
        if drafting is not None:
            _, step, others = timed_texts(drafting, rows, new)
            timed["drafting"].append(step)
            same += [one == other for one, other in zip(texts, others, strict=True)]
        for name, measured in beside.items():
            others_first, step = measured()
            timed[name].append(step)
            timed.setdefault(f"first {name}", []).append(others_first)
    median = {key: statistics.median(values) for key, values in timed.items() if values}
    weights, cache = bytes_a_step(model), sum(group.cache.bytes for group in engine.executor.groups)
    limit = weights / bytes_a_second
    row = {
        "experts": len(model.members) - 1,
        "batch": batch,
        "prompt": prompt,
        "new_tokens": new,
        "ms_a_step": 1e3 * median["engine"],
        "tokens_a_second": batch / median["engine"],
        "limit_ms": 1e3 * limit,
        "share_of_limit": limit / median["engine"],
        "first_token_ms": 1e3 * median["first"],
        "weight_bytes": weights,
        "cache_bytes": cache,
        "peak_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
        "made_seconds": made,
        "compile_seconds": engine.executor.prepared_seconds,
    }
    if drafting is not None:
        row |= _drafted(drafting)
        row["drafting_ms"] = 1e3 * median["drafting"]
        row["times_without_drafts"] = median["engine"] / median["drafting"]
        row["same_texts"] = statistics.mean(same)
    for name in beside:
        row[f"{name}_ms"] = 1e3 * median[name]
        row[f"times_{name}"] = median[name] / median["engine"]
        row[f"first_{name}_ms"] = 1e3 * median[f"first {name}"]
        row[f"first_times_{name}"] = median[f"first {name}"] / median["first"]
    return row


def base_beside(model: ComposedForCausalLM, batch: int, prompt: int, new: int) -> dict[str, Callable[[], Speed]]:
    """The base alone, by an engine of its own; nothing for a member that is alone."""
    if is_alone(model):
        return {}
    base = alone(model, "base")
    engine, rows = Engine(base, batch, prompt + new), random_prompts(base, [prompt] * batch)
    engine_steps(engine, rows, min(new, 8))
    return {"base": lambda: engine_steps(engine, rows, new)}


def _drafted(engine: Engine) -> dict[str, Any]:
    """Count an engine's drafts: tokens tried, and the share of them that all members would have written."""
    assert engine.speculator is not None
    drafted, accepted = engine.speculator.drafted, engine.speculator.accepted
    return {"drafted": drafted, "accepted": accepted / max(1, drafted)}


def sweep(
    model: ComposedForCausalLM,
    batches: Sequence[int] = (1,),
    prompts: Sequence[int] = (128,),
    new: int = 64,
    rounds: int = 3,
    speculation: Speculation | None = None,
    progress: Callable[[str], None] = lambda text: None,
    against: Sequence[str] = (),
) -> dict[str, Any]:
    """Measure a composition and its base: the first batch and prompt together, then each varied by itself. `against`:
    other engines on the base (peers.py)."""
    check(model, batches, prompts, new)
    speed = bandwidth(model.device)
    progress(f"memory moves {speed / 1e9:,.1f} GB/s")
    rows = []
    with peers(against, model, max(batches), max(prompts) + new) as others:
        for batch, prompt in [
            *((batch, prompts[0]) for batch in batches),
            *((batches[0], each) for each in prompts[1:]),
        ]:
            beside = base_beside(model, batch, prompt, new)
            for name, peer in others.items():
                beside[name] = partial(peer, random_prompts(model, [prompt] * batch), new)
                beside[name]()  # what it prepares is not measured
            rows.append(measure(model, batch, prompt, new, rounds, speed, speculation, beside))
            progress(in_words(rows[-1]))
    dtype = is_packed(model.member(next(iter(model.members)))) or str(model.dtype).removeprefix("torch.")
    return {"bytes_a_second": speed, "dtype": dtype, "rule": model.rule.name, "rows": rows, "against": list(others)}


def check(model: ComposedForCausalLM, batches: Sequence[int], prompts: Sequence[int], new: int) -> None:
    """Refuse what cannot be measured, before anything is."""
    for name, values in (("batch", batches), ("prompt", prompts)):
        if not values or min(values) < 1 or max(values) > MOST:
            raise EngineError(f"expected whole numbers from 1 to {MOST:,} for {name}; got {list(values)}")
    if new < 2:  # below two new tokens nothing is timed
        raise EngineError(f"expected at least two new tokens; got {new}")
    model.config.check_room(max(prompts), new, "the longest prompt", "--new-tokens")


def in_words(row: dict[str, Any]) -> str:
    """A row as a line."""
    text = (
        f"{row['experts']} experts, batch {row['batch']}, prompt {row['prompt']}: {row['ms_a_step']:.2f} ms a step, "
        f"{row['tokens_a_second']:,.0f} tokens/s, {row['share_of_limit']:.0%} of the limit"
    )
    names = [key.removeprefix("times_") for key in row if key.startswith("times_") and key != "times_without_drafts"]
    text += "".join(f", {row[f'times_{name}']:.2f} × {name}" for name in names)
    if "times_without_drafts" in row:
        text += (
            f", {row['times_without_drafts']:.2f} × with drafts ({row['accepted']:.0%} of {row['drafted']:,} tokens "
            f"accepted, {row['same_texts']:.0%} of the texts the same)"
        )
    return text
