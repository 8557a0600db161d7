"""Real servers for tests: a process of its own, on a real port, with a composition that fits a test."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai

import tessellm

from conftest import build_model, character_tokenizer, perturbed, save_member


def tiny(home: Path) -> tuple[Any, Path]:
    """A composition by Eq. 2, and its folder. Texts of these random members go on for a while."""
    base = build_model("llama", 3)
    members = {"base": base, "math": perturbed(base, 1), "coding": perturbed(base, 2, only="layers.1")}
    tokenizer = character_tokenizer()
    places = {name: str(save_member(member, home / name, tokenizer)) for name, member in members.items()}
    model = tessellm.compose(places.pop("base"), places, rule="product")
    model.save_pretrained(home / "tiny")
    return model, home / "tiny"


PATIENCE = 120  # seconds: on a busy machine any answer may take long, which is no failure; one that never comes is


@dataclass
class Running:
    """A server that was started."""

    url: str
    process: subprocess.Popen[str]
    log: Path
    http: httpx.Client

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.http.get(path, **options)

    def post(self, path: str, **options: Any) -> httpx.Response:
        return self.http.post(path, **options)

    def client(self, key: str = "none", **options: Any) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=key, **{"max_retries": 0, "timeout": PATIENCE, **options}
        )

    def metric(self, name: str) -> float:
        """A number of /metrics; 0 where nothing was counted yet."""
        page = self.get("/metrics").text
        found = re.search(rf"^{re.escape(name)} (\S+)$", page, re.MULTILINE)
        return float(found[1]) if found else 0.0

    def wait_until_idle(self, seconds: float = PATIENCE) -> None:
        deadline = time.monotonic() + seconds
        while self.metric("tessellm_slots_used") or self.metric("tessellm_queue_waiting"):
            assert time.monotonic() < deadline, "slots were not given back"
            time.sleep(0.05)


@contextmanager
def serving(
    folder: Path, log: Path, *options: str, env: dict[str, str] | None = None, descriptors: int | None = None
) -> Iterator[Running]:
    """A server on that composition, on any free port; with no more than so many descriptors."""
    command = [sys.executable, "-m", "tessellm.cli", "serve", str(folder), "--port", "0", *options]
    if descriptors is not None:
        command = ["sh", "-c", f'ulimit -n {descriptors} && exec "$@"', "sh", *command]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **(env or {})}
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=variables)
        assert process.stdout is not None
        try:
            found = re.search(r"http://\S+", process.stdout.readline())
            assert found, log.read_text()
            with httpx.Client(base_url=found[0], timeout=PATIENCE) as http:
                yield Running(found[0], process, log, http)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait(30)
            process.stdout.close()
