"""Slots that fit into memory: what they take is what is said, and a share of what is free."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tessellm
from tessellm.engine import memory
from tessellm.engine.engine import Engine
from tessellm.engine.memory import SHARE, SHORTEST, SlotBytes, fit, free_bytes, plan_slots, slot_bytes
from tessellm.errors import EngineError

from conftest import build_model, perturbed

EACH = SlotBytes(token=1000, slot=5000)


@pytest.mark.parametrize("arch", ["llama", "gemma2", "gpt2"])
def test_caches_take_what_was_said(arch: str) -> None:
    base = build_model(arch)
    model = tessellm.compose(base, {"a": perturbed(base, 1), "b": perturbed(base, 2)}, rule="product")
    engine = Engine(model, slots=3, context=64)
    each = slot_bytes(model)
    assert sum(group.cache.bytes for group in engine.executor.groups) == SlotBytes(each.token, 0).of(3, 64)


def test_slots_take_a_share_of_what_is_free() -> None:
    for free in (10**7, 10**8, 10**9, 10**10):
        for asked in ({}, {"slots": 2}, {"context": 600}, {"slots": 5}):
            plan = fit(EACH, free, 8192, **asked)
            assert plan.bytes == EACH.of(plan.slots, plan.context)
            assert plan.bytes <= free * SHARE or plan.slots == 1 or plan.context == SHORTEST
            assert {name: getattr(plan, name) for name in asked} == asked
    assert (fit(EACH, 10**12, 8192).slots, fit(EACH, 10**12, 8192).context) == (16, 4096)
    assert fit(EACH, 10**12, 128).context == 128
    assert fit(EACH, 10**7, 8192).slots == 1
    told = fit(EACH, 10**6, 8192, slots=32, context=2048)
    assert (told.slots, told.context, told.bytes > told.free) == (32, 2048, True)
    assert fit(SlotBytes(0, 1), 10**6, None).context == 4096  # recurrent members


def test_more_than_there_is_is_refused(composed: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch, cli: Any) -> None:
    with pytest.raises(EngineError, match=r"100000000 slots of 128 tokens: .* GiB free on cpu. Use fewer slots"):
        plan_slots(composed[0], slots=100_000_000)
    ran = cli("serve", composed[1], "--port", "0", "--slots", 100_000_000)
    assert (ran.code, "Use fewer slots" in ran.err.replace("\n", " ")) == (2, True)


def test_what_is_free(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    cpu = torch.device("cpu")
    assert free_bytes(cpu) > 1 << 20  # all of it, where nobody tells
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 7 kB\n")
    assert free_bytes(cpu) == 7 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert free_bytes(cpu) == 7 * 1024
    (tmp_path / "memory.max").write_text("3000\n")
    assert free_bytes(cpu) == 2000
