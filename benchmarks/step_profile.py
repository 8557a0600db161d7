"""Where the time of a step goes: by kernel, as PyTorch's profiler sees them, and what no kernel fills.

On a GPU a kernel is told from its namesakes by its grid, so that each linear layer is a line of its own. On a CPU,
lines are PyTorch's operations.
"""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from tessellm.bench.measure import engine_steps, synchronise
from tessellm.engine.engine import Engine
from tessellm.engine.sampling import Sampling

SHOWN = 24


def profiled(engine: Engine, rows: Sequence[Sequence[int]], new: int, steps: int) -> dict[str, Any]:
    """Milliseconds a step by kernel, over some steps in which all rows are decoded."""
    seconds = engine_steps(engine, rows, new)[1]  # as fast as it is when nobody looks
    on_gpu = engine.model.device.type == "cuda"
    engine.prefixes.forget()
    requests = [engine.submit(row, Sampling(steps + 4, ignore_end=True)) for row in rows]
    while not all(request.tokens for request in requests):
        engine.step()
    synchronise(engine.model.device)
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as prof:
        for _ in range(steps):
            engine.step()
        synchronise(engine.model.device)
    while engine.busy:
        engine.step()
    spent = _kernels(prof) if on_gpu else _operations(prof)
    table: list[dict[str, Any]] = [
        {"kernel": name, "calls": calls / steps, "ms": micros / 1e3 / steps, "share": micros / 1e6 / steps / seconds}
        for name, (calls, micros) in sorted(spent.items(), key=lambda item: -item[1][1])
    ]
    busy = sum(line["ms"] for line in table)
    return {"ms_a_step": 1e3 * seconds, "busy_ms": busy, "idle_ms": 1e3 * seconds - busy, "kernels": table[:SHOWN]}


def _kernels(prof: Any) -> dict[str, tuple[int, float]]:
    """Calls and microseconds of each kernel and grid; copies and fills too."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        prof.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return own_times(event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"))


def own_times(events: Iterable[dict[str, Any]]) -> dict[str, tuple[int, float]]:
    """By kernel and grid. One that began while an earlier one ran waited for it, so it counts from that one's end on:
    together they are the time that the device was busy."""
    found: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    busy_until = 0.0
    for event in sorted(events, key=lambda event: float(event["ts"])):
        begin, end = float(event["ts"]), float(event["ts"]) + float(event["dur"])
        grid = event.get("args", {}).get("grid")
        name = event["name"].split("<")[0].split("(")[0][:60]
        key = f"{name} {'×'.join(map(str, grid))}" if grid else name
        calls, micros = found[key]
        found[key] = calls + 1, micros + max(0.0, end - max(begin, busy_until))
        busy_until = max(busy_until, end)
    return found


def _operations(prof: Any) -> dict[str, tuple[int, float]]:
    return {each.key: (each.count, each.self_cpu_time_total) for each in prof.key_averages()}
