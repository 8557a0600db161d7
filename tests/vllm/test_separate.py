"""Tensor parallelism and compiled members, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


def run_apart(folder: Path, family: str, rule: str, seed: int = 0, cache: Path | None = None, **options: Any) -> int:
    """How many models the case compiled, after it held."""
    paths = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    environment["VLLM_CACHE_ROOT"] = str(cache or folder / "cache")
    command = [sys.executable, "-W", "ignore", str(HERE / "separate.py"), str(folder), family, rule, str(seed)]
    done = subprocess.run(
        [*command, json.dumps(options)], env=environment, capture_output=True, text=True, timeout=800, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return int(done.stdout.splitlines()[-1]) if rule != "default" else 0


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("family", "rule"), [("lora", "routed"), ("adapters", "default")])
def test_tensor_parallelism(family: str, rule: str, tmp_path: Path) -> None:
    run_apart(tmp_path, family, rule, tensor_parallel_size=2, distributed_executor_backend="mp")


@pytest.mark.timeout(900)
def test_compiled_members_with_a_warm_cache(tmp_path: Path) -> None:
    """Three members of one shape: each needs a cache entry of its own, since a graph names its member's layers. Then
    other weights and another rule with that cache; then adapters on a base of the same shape, which need a third."""
    cache, entries = tmp_path / "cache", tmp_path / "cache" / "torch_compile_cache" / "torch_aot_compile"
    assert run_apart(tmp_path, "llama", "mixture", 0, cache, enforce_eager=False) == 3
    assert len(list(entries.iterdir())) == 3
    assert run_apart(tmp_path, "llama", "product", 7, cache, enforce_eager=False) == 3
    assert len(list(entries.iterdir())) == 3
    assert run_apart(tmp_path, "lora", "mixture", 0, cache, enforce_eager=False) == 2
    assert len(list(entries.iterdir())) == 5


@pytest.mark.timeout(900)
def test_energies_of_compiled_layers(tmp_path: Path) -> None:
    """Of the composed model: on a CPU, vLLM compiles nothing where it has adapters of its own."""
    assert run_apart(tmp_path, "lora", "routed", enforce_eager=False) == 2
