"""Count the functions of ours that a token passes through: from a prompt to its first token, and for each later one.

    python benchmarks/hops.py [--list] [--before COMMIT]      the second needs that commit in a git repository

One greedy request with the default rule runs on a tiny composition of three Llamas on a CPU. A function counts once
however often it is called: every named function, method or property whose code lies in src/tessellm; comprehensions,
lambdas and what Hugging Face and torch run beneath do not count. The first token's count runs from `Engine.generate`
until the request has the token; a later token's is that of a step in the middle of the text; the last token's step also
frees the slot. The rule's own functions are counted by themselves: what a rule computes is not the engine's path.
Writes results/hops.json, with the same numbers of an earlier commit beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import tessellm
from tessellm.engine.engine import Engine
from tessellm.engine.sampling import Sampling

ROOT = Path(__file__).resolve().parent.parent
SOURCE = str(Path(tessellm.__file__).parent)
BEFORE = "b500333"
NEW = 6
RULES = ("rules", "evidence", "gates", "termination", "vocabulary_sums")  # files and folders, now and before
GOALS = {"first": (30, 14), "later": (12, 7)}  # functions, files, without the rule's own
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


class Hops:
    """Functions of ours that were called, by number of tokens that the engine's one request had by then."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.request = engine, None
        self.called: dict[int, dict[tuple[str, str], None]] = {}

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if self.request is None and self.engine.waiting:
            self.request = self.engine.waiting[0]
        if event == "call" and code.co_filename.startswith(SOURCE) and not code.co_name.startswith("<"):
            called = self.called.setdefault(0 if self.request is None else len(self.request.tokens), {})
            called[os.path.relpath(code.co_filename, SOURCE), code.co_qualname.replace(".<locals>", "")] = None


def composition() -> Any:
    torch.manual_seed(0)
    base, *experts = (LlamaForCausalLM(LlamaConfig(**SIZES)).eval() for _ in range(3))
    return tessellm.compose(base, {f"expert{n}": expert for n, expert in enumerate(experts)})


def measure() -> dict[str, list[tuple[str, str]]]:
    """The functions on the way to the first token, to a later one, and to the last."""
    engine = Engine(composition(), slots=2, context=64)
    engine.generate([[5, 6, 7]], Sampling(NEW, ignore_end=True))  # buffers are made, imports are done
    hops, sampling = Hops(engine), Sampling(NEW, ignore_end=True)
    sys.setprofile(hops)
    engine.generate([[9, 8, 7]], sampling)
    sys.setprofile(None)
    return {name: list(hops.called[tokens]) for name, tokens in (("first", 0), ("later", NEW // 2), ("last", NEW - 1))}


def measure_commit(commit: str) -> dict[str, Any]:
    """The same of an earlier commit, by this very script."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--detach", "--quiet", str(tree), commit], check=True)
        try:
            ran = subprocess.run(
                [sys.executable, __file__, "--json"],
                env={**os.environ, "PYTHONPATH": str(tree / "src")},
                capture_output=True,
                text=True,
                check=True,
            )
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def counted(called: list[Any], rule: bool) -> tuple[int, int]:
    """Functions and files, the rule's own or all others."""
    chosen = [file for file, _ in called if file.startswith(RULES) == rule]
    return len(chosen), len(set(chosen))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the functions, too")
    parser.add_argument("--before", default=BEFORE, help="the commit to compare with")
    parser.add_argument("--json", action="store_true", help="print what was measured and write nothing")
    given = parser.parse_args()
    start, after = time.perf_counter(), measure()
    if given.json:
        print(json.dumps(after))
        return
    from tessellm_lab.common.claims import Claim, Result

    before, claims = measure_commit(given.before), []
    for token, called in after.items():
        for rule, part in ((False, "the engine's path"), (True, "the rule's own")):
            now, was = counted(called, rule), counted(before[token], rule)
            said = f"{token} token, {part}: functions, files (before, at {given.before}: {was[0]}, {was[1]})"
            goal = GOALS.get(token) if not rule else None
            holds = None if goal is None else now[0] <= goal[0] and now[1] <= goal[1]
            target = None if goal is None else f"≤ {goal[0]}, {goal[1]}"
            claims.append(Claim(f"{token}, rule" if rule else token, said, list(now), target, holds))
            print(f"{said}: {now[0]}, {now[1]}")
        if given.list:
            print("\n".join(f"    {file}: {name}" for file, name in called))
    tables = {"before": {"commit": given.before, **before}, "after": after}
    Result("hops", claims, 0, "cpu", time.perf_counter() - start, tables=tables).write(ROOT / "results")


if __name__ == "__main__":
    main()
