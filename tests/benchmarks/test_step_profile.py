"""Profiles: lines add up to what was measured, whether launches overlap or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from random_models import random_composition
from step_profile import own_times, profiled
from tessellm.engine.engine import Engine


def launch(name: str, begin: float, duration: float, grid: list[int] | None = None) -> dict[str, Any]:
    return {"name": name, "ts": begin, "dur": duration, "args": {"grid": grid} if grid else {}}


def test_a_launch_that_waited_counts_from_the_end_of_the_one_before_it():
    events = [launch("norm", 2, 10, [4, 1, 1]), launch("product<int>", 0, 10, [36, 1, 8]), launch("copy", 15, 1)]
    assert own_times(events) == {"product 36×1×8": (1, 10.0), "norm 4×1×1": (1, 2.0), "copy": (1, 1.0)}


def test_one_inside_another_has_no_time_of_its_own():
    assert own_times([launch("long", 0, 10), launch("short", 3, 2), launch("short", 20, 2)]) == {
        "long": (1, 10.0),
        "short": (2, 2.0),
    }


def test_a_step_on_the_cpu_is_told_by_operation():
    model = random_composition("gemma-tiny", 1, "full", "product", "cpu", torch.float32)
    found = profiled(Engine(model, 1, 64), [[5, 6, 7]], 8, steps=4)
    names = {line["kernel"] for line in found["kernels"]}
    assert any("mm" in name or "linear" in name for name in names)
    assert found["ms_a_step"] == pytest.approx(found["busy_ms"] + found["idle_ms"])
    assert all(line["calls"] > 0 for line in found["kernels"])
