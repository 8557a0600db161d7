"""Other engines on a composition's base, measured in turns with ours. Each is a process of its own that reads prompts,
token ids, and answers with seconds.

    llama.cpp[=FILE.gguf]   by the npm package node-llama-cpp; without a file, the base's own GGUF file
    vllm[=PYTHON]           by an interpreter that has vLLM; it reads the base's weights as they run here
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..errors import EngineError, nearest
from ..model import ComposedForCausalLM

HERE = Path(__file__).parent
LIBRARY = "node-llama-cpp"
KNOWN = ("llama.cpp", "vllm")


class Speed(NamedTuple):
    """Seconds to the first token of all rows, and seconds a step after it."""

    first: float
    step: float


class Peer:
    """An engine in a process of its own, while it lives; `log` is a file for what it says beside its answers."""

    def __init__(self, name: str, command: Sequence[str | Path], log: Path):
        self.name, self.log = name, log
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )

    def __call__(self, rows: Sequence[Sequence[int]], new: int) -> Speed:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            print(json.dumps({"prompts": rows, "new": new}), file=self.process.stdin, flush=True)
            return Speed(**json.loads(self.process.stdout.readline()))
        except (OSError, ValueError) as error:
            reason = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
            why = next((line for line in reversed(reason) if "Error" in line), reason[-1] if reason else "it ended")
            raise EngineError(f"--against {self.name}: {why[:300]}") from error

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextmanager
def peers(wanted: Sequence[str], model: ComposedForCausalLM, rows: int, length: int) -> Iterator[dict[str, Peer]]:
    """Start the engines that are wanted, for so many rows of so many tokens; end them."""
    with tempfile.TemporaryDirectory() as scratch:
        commands = dict(_command(each, model, Path(scratch), rows, length) for each in wanted)
        started = {name: Peer(name, command, Path(scratch) / f"{name}.log") for name, command in commands.items()}
        try:
            yield started
        finally:
            for peer in started.values():
                peer.close()


def _command(
    wanted: str, model: ComposedForCausalLM, scratch: Path, rows: int, length: int
) -> tuple[str, list[str | Path]]:
    """Return an engine's name and what starts it."""
    name, _, given = wanted.partition("=")
    if name not in KNOWN:
        raise EngineError(f"--against {wanted}: {nearest(name, KNOWN)}")
    if name == "llama.cpp":
        file = Path(given) if given else _own_file(model)
        if file is None or not file.is_file():
            raise EngineError(f"--against {wanted}: expected llama.cpp=FILE.gguf, a file of the base's weights")
        node, library = shutil.which("node"), _node_library()
        if node is None or library is None:
            raise EngineError(
                f"--against {wanted}: the npm package {LIBRARY} is not installed here. Fix: npm install {LIBRARY}"
            )
        threads = str(torch.get_num_threads())
        return f"{name} {file.name}", [node, HERE / "llama_cpp.mjs", library, file, threads]
    if not (scratch / "base").exists():
        first: Any = model.member(next(iter(model.members)))
        first.save_pretrained(scratch / "base")
    return name, [given or sys.executable, HERE / "vllm_peer.py", scratch / "base", str(length), str(rows)]


def _own_file(model: ComposedForCausalLM) -> Path | None:
    """Return the GGUF file that the base came from."""
    source = model.loaded_members[0].source if model.loaded_members else None
    return source.path if source is not None and source.file else None


def _node_library() -> Path | None:
    """Find the package in node_modules here, above or where NODE_PATH says."""
    above = [folder / "node_modules" for folder in (Path.cwd(), *Path.cwd().parents)]
    places = [*above, *map(Path, filter(None, os.environ.get("NODE_PATH", "").split(os.pathsep)))]
    return next((file for place in places if (file := place / LIBRARY / "dist" / "index.js").is_file()), None)
