"""A composition's latency beside that of its base alone, by the same server, and beside vLLM's where that is there."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..errors import EngineError
from ..load import split_speaker
from .latency import LIMIT, LatencyPlan, measure_latency
from .served import served, served_by_vllm

Progress = Callable[[str], None]


def compare_latency(
    model: str, plan: LatencyPlan, vllm: Path | None = None, progress: Progress = lambda text: None
) -> dict[str, Any]:
    """Measure a composition and its base, or one member, each by a server of its own; `vllm`: the Python of an
    environment that has it, for a composition's folder."""
    path, member = split_speaker(model)
    servers: dict[str, Any] = {member or "composition": lambda: served(model, plan.slots, plan.context)}
    if member is None:
        servers["base alone"] = lambda: served(f"{path}:base", plan.slots, plan.context)
    if vllm is not None:
        servers["vLLM"] = lambda: served_by_vllm(vllm, model, plan.slots, plan.context)
    busy, rows = os.getloadavg()[0] if hasattr(os, "getloadavg") else None, {}
    for name, start in servers.items():
        try:
            with start() as server:
                rows[name] = measure_latency(server, plan, lambda text, name=name: progress(f"{name}: {text}"))  # type: ignore[misc]
        except EngineError as error:
            if name != "vLLM":
                raise
            progress(f"vLLM is left out: {error}")
    return {"plan": asdict(plan), "limit": LIMIT, "load_average_before": busy, "servers": rows}
