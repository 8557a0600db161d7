"""What a column costs: milliseconds per token when writing in batches, and memory, both over those of the base."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from tessellm.evaluate.journal import key_of
from tessellm.model import ComposedForCausalLM

from .columns import Column
from .measure import Measuring, Task
from .results import SetResult

TIMED_TOKENS = 32


def costs_of(result: SetResult, tasks: Sequence[Task], measuring: Measuring) -> dict[str, Any]:
    """Costs by column, experts left out; empty where nothing was written."""
    written = [task for task in tasks if task.write]
    kept = [column for column in result.columns if column.kind != "expert"]
    if measuring.frozen:
        kept = [column for column in kept if _key(column, written, measuring) in measuring.journal]
    if not written or not any(column.kind == "base" for column in kept):
        return {}
    found = {column.name: _cost(column, result, written, measuring) for column in kept}
    base = found[next(column.name for column in kept if column.kind == "base")]
    for cost in found.values():
        cost |= {f"{name} over the base's": cost[name] / base[name] for name in ("ms per token", "bytes")}
    return found


def _key(column: Column, tasks: Sequence[Task], measuring: Measuring) -> str:
    return key_of("cost", column.identity, measuring.plan.timed, [task.name for task in tasks])


def _cost(column: Column, result: SetResult, tasks: Sequence[Task], measuring: Measuring) -> dict[str, float]:
    key = _key(column, tasks, measuring)
    if key not in measuring.journal:
        if measuring.plan.timed:
            seconds, tokens, more = _timed(column, result.columns, tasks[0], measuring)
        else:
            cells = [result.written[task.name] for task in tasks]
            entries = [each[column.name] for each in cells if column.name in each]
            seconds, tokens = sum(entry["seconds"] for entry in entries), sum(sum(entry["tokens"]) for entry in entries)
            more = 0
        size = float(weight_bytes(models_of(column, result.columns)) + more)
        measuring.journal.add(key, cost={"ms per token": 1000 * seconds / max(1, tokens), "bytes": size})
    return dict(measuring.journal[key]["cost"])


def _timed(column: Column, columns: Sequence[Column], task: Task, measuring: Measuring) -> tuple[float, int, int]:
    """Seconds, tokens, and the most memory beside weights; the second time that the same prompts are written for."""
    some = replace(task, write=task.write[: measuring.plan.timed], new_tokens=TIMED_TOKENS)
    measuring.produce(column, columns, [some])
    before = 0
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    since = time.perf_counter()
    (written,) = measuring.produce(column, columns, [some])
    seconds, more = time.perf_counter() - since, 0
    if torch.cuda.is_available():
        more = torch.cuda.max_memory_allocated() - before
    return seconds, sum(each.tokens for each in written), more


def models_of(column: Column, columns: Sequence[Column]) -> list[ComposedForCausalLM]:
    """The models that a column needs: a router all experts."""
    if column.kind == "router":
        return [each.model for each in columns if each.kind == "expert"]
    return [column.model]


def weight_bytes(models: Sequence[ComposedForCausalLM]) -> int:
    """Memory of the weights; what is shared counts once."""
    storages = [parameter.untyped_storage() for model in models for parameter in model.parameters()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
