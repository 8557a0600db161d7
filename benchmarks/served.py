"""Servers to measure: processes of their own, timed from their start. Knows commands and the address that they print or
answer at; of what they serve no more than the precision that vLLM has to be told."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from tessellm.errors import EngineError

PATIENCE = 600.0  # seconds until a server must be ready
VLLM_MEMORY = "0.5"  # share of the host's memory for vLLM, where there is no GPU


@dataclass(frozen=True)
class ServedModel:
    """A server that is ready."""

    url: str
    model: str  # its name there
    began: float  # when its process was started
    ready: float  # when it was ready; both of time.perf_counter


@contextmanager
def served(model: str, slots: int, context: int) -> Iterator[ServedModel]:
    """Serve a composition, or one member of it (MODEL:MEMBER), by tessellm's own server."""
    command = [sys.executable, "-m", "tessellm.serve", model, str(slots), str(context)]
    with _process(command) as (process, began, log):
        assert process.stdout is not None
        found = re.search(r"(\S+) at (http://\S+)", process.stdout.readline())
        if found is None:
            raise EngineError(f"no server of {model} came up: {_end_of(log)}")
        yield ServedModel(found[2], found[1], began, time.perf_counter())


@contextmanager
def served_by_vllm(python: Path, model: str, slots: int, context: int) -> Iterator[ServedModel]:
    """Serve a composition's folder by vLLM, in the environment of that interpreter, in the precision that it has: vLLM
    itself would read float32 as bfloat16."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = Path(model) / "config.json"
    dtype = json.loads(config.read_text(encoding="utf-8")).get("dtype") if config.is_file() else None
    own = ["--max-num-seqs", str(slots), "--max-model-len", str(context), "--dtype", dtype or "auto"]
    if not torch.cuda.is_available():  # of the host's memory it would take nearly all, or refuse to start
        own += ["--gpu-memory-utilization", VLLM_MEMORY]
    command = [str(python), "-m", "tessellm.cli", "serve", model, "--engine", "vllm", "--port", str(port), "--", *own]
    with _process(command) as (process, began, log):
        url = f"http://127.0.0.1:{port}"
        while not _answers(f"{url}/health"):
            if process.poll() is not None or time.perf_counter() - began > PATIENCE:
                raise EngineError(f"vLLM does not serve {model}: {_end_of(log)}")
            time.sleep(0.2)
        yield ServedModel(url, Path(model).name, began, time.perf_counter())


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@contextmanager
def _process(command: Sequence[str]) -> Iterator[tuple[subprocess.Popen[str], float, Path]]:
    """Run a command; end it, and what it started, when it is no longer needed."""
    with tempfile.TemporaryDirectory() as place, (Path(place) / "log.txt").open("w") as errors:
        began = time.perf_counter()
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )  # fmt: skip
        try:
            yield process, began, Path(errors.name)
        finally:
            assert process.stdout is not None
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()


def _end_of(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it says nothing"
