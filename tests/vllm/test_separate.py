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


def run_apart(folder: Path, family: str, rule: str, seed: int = 0, cache: Path | None = None, **options: Any) -> Any:
    """What the case printed, after it held."""
    paths = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    environment["VLLM_CACHE_ROOT"] = str(cache or folder / "cache")
    command = [sys.executable, "-W", "ignore", str(HERE / "separate.py"), str(folder), family, rule, str(seed)]
    done = subprocess.run(
        [*command, json.dumps(options)], env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(("family", "rule"), [("lora", "evidence"), ("gemma2", "product")])
def test_tensor_parallelism(family: str, rule: str, tmp_path: Path) -> None:
    run_apart(tmp_path, family, rule, tensor_parallel_size=2, distributed_executor_backend="mp")


def test_compiled_members_with_a_warm_cache(tmp_path: Path) -> None:
    """Three members of one shape: a graph that names one's layers must never serve another. Then other weights and
    another rule, with graphs from the cache; then adapters on a base of that shape."""
    cache = tmp_path / "cache"
    cold = run_apart(tmp_path / "cold", "llama", "evidence", cache=cache, enforce_eager=False)
    assert cold == {"compiled": 3, "loaded": 0}
    warm = run_apart(tmp_path / "warm", "llama", "product", 7, cache, enforce_eager=False)
    assert warm == {"compiled": 0, "loaded": 3}
    adapted = run_apart(tmp_path / "lora", "lora", "evidence", 0, cache, enforce_eager=False)
    assert adapted["compiled"] + adapted["loaded"] == 2
