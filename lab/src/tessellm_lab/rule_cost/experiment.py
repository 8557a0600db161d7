"""What the default rule costs over Eq. 2 in a decoding step, at the shapes of google/gemma-2-2b.

One token for one sequence: log-probabilities over 256,000 tokens from the base and its experts, under `mixture` and,
beside it, `evidence`. On a GPU each rule also chooses its likeliest token, compiled. The step itself is
bounded below by reading every member's weights once (2.61 billion parameters in bfloat16) at the memory bandwidth
measured here; the cost of a rule is given as a share of that bound, so the true share is smaller still.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tessellm.rules import BaseRule, Mixture, Product, product

from ..common.claims import Claim, Result
from ..common.devices import device_for
from ..evidence import Evidence, Stopping

VOCABULARY, WEIGHT_BYTES = 256_000, 2 * 2.614e9
EXPERTS = (2, 3, 8)
ENDS = (1, 107)  # Gemma's end of text and end of turn
LIMITS = {"mixture": 0.03, "evidence": 0.05}  # of a step's lower bound
JUDGED = {"mixture": (3,), "evidence": EXPERTS}  # numbers of experts for which that was to be reached


def timed(work: Callable[[], Any], device: str, repeats: int) -> float:
    """Median microseconds a call; on a GPU the calls are replays of one captured graph."""
    for _ in range(3):
        work()
    if device == "cpu":
        times = []
        for _ in range(repeats):
            began = time.perf_counter()
            work()
            times.append((time.perf_counter() - began) * 1e6)
        return statistics.median(times)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return events(graph.replay, repeats)


def events(work: Callable[[], Any], repeats: int) -> float:
    """Median microseconds between CUDA events around one call."""
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def bandwidth() -> float:
    """Bytes a second, read and written, of a large copy on the GPU."""
    source = torch.rand(2**29, device="cuda")
    target = torch.empty_like(source)
    microseconds = events(lambda: target.copy_(source), 10)
    return 2 * source.numel() * 4 / (microseconds * 1e-6)


def default_rules(experts: int) -> dict[str, BaseRule]:
    """The rules that are compared, for so many experts."""
    return {
        "mixture": Mixture(),
        "evidence": Stopping(Evidence(), "owner", (ENDS,) * (experts + 1)),
    }


@torch.no_grad()
def measure(experts: int, vocabulary: int, device: str, repeats: int) -> dict[str, float]:
    """Microseconds of Eq. 2 and of the default rules, for one token in the middle of a sequence."""
    generator = torch.Generator(device=device).manual_seed(experts)
    logp = torch.randn(experts + 1, 1, 66, vocabulary, generator=generator, device=device).mul_(3).log_softmax(-1)
    tokens = torch.randint(vocabulary, (1, 66), generator=generator, device=device)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    row, token, real = logp[:, :, 65:].contiguous(), tokens[:, 65:], mask[:, 65:]
    weights = torch.ones(experts, device=device)
    states = {
        name: rule(logp[:, :, :65], tokens[:, :65], mask[:, :65], None)[1]
        for name, rule in default_rules(experts).items()
    }
    del logp
    cost = {"eq2": timed(lambda: product(row, weights), device, repeats)}
    for name, rule in default_rules(experts).items():
        cost[name] = timed(lambda rule=rule, name=name: rule(row, token, real, states[name]), device, repeats)  # type: ignore[misc]
    for name, rule in {"eq2": Product(), **default_rules(experts)}.items() if device == "cuda" else ():
        decide = torch.compile(lambda *given, rule=rule: rule(*given)[0][:, -1].max(-1), dynamic=False)
        given = row, token, real, states.get(name)
        cost[f"{name}, fast"] = timed(lambda decide=decide, given=given: decide(*given), device, repeats)  # type: ignore[misc]
    return cost


def claims_of(table: list[dict[str, Any]]) -> list[Claim]:
    """What the defaults add to Eq. 2, as engines run both on a GPU; as they are beside it."""
    claims = []
    for cell in table:
        experts, times, bound = cell["experts"], cell["microseconds"], cell.get("step_bound_microseconds")
        for rule, limit in LIMITS.items():
            extra, what = times[rule] - times["eq2"], f"{experts} experts: `{rule}` over Eq. 2"
            if bound is None:
                claims.append(Claim(f"{rule}-{experts}", f"{what}, microseconds", round(extra, 1)))
                continue
            share = (times[f"{rule}, fast"] - times["eq2, fast"]) / bound
            target = (f"≤ {limit}", share <= limit) if experts in JUDGED[rule] else ()
            text = f"{what}, as engines run both, as a share of the step's lower bound"
            claims.append(Claim(f"{rule}-fast-{experts}", text, round(share, 4), *target))
            claims.append(Claim(f"{rule}-{experts}", f"{what}, as they are", round(extra / bound, 4)))
    return claims


def run(seed: int, out: Path, size: str, log: Callable[[str], None] = print) -> dict[str, Any]:
    """Write `rule-cost.json`."""
    began = time.monotonic()
    device = device_for(size)
    vocabulary, repeats = (VOCABULARY, 200) if size == "full" else (VOCABULARY // 8, 10)
    bytes_a_second = bandwidth() if size == "full" else None
    table: list[dict[str, Any]] = []
    for experts in EXPERTS:
        cost = measure(experts, vocabulary, device, repeats)
        cell: dict[str, Any] = {"experts": experts, "vocabulary": vocabulary, "microseconds": cost}
        if bytes_a_second is not None:
            cell["step_bound_microseconds"] = (experts + 1) * WEIGHT_BYTES / bytes_a_second * 1e6
        table.append(cell)
        log(str(cell))
    tables = {"cost": table, "bandwidth": bytes_a_second}
    return Result("rule-cost", claims_of(table), seed, size, time.monotonic() - began, (), tables).write(out)
