"""The first token and the first minute on one GPU: google/gemma-2-2b's shapes, random weights, bfloat16.

    python benchmarks/gpu_latency.py --parts first                              the first token, a minute or two
    python benchmarks/gpu_latency.py --parts cases --only "lora mixture"        one case, cold where its kernels are new
    python benchmarks/gpu_latency.py --device cpu --shapes gemma-tiny --quick   all of it in small, to see that it runs

`first`: the time to the first token, prompts of 128 tokens by kernels and by modules, and of 2,048 against the device's
matrix rate, on engines that prepare little (first_token.py). `cases`, each a process (latency_case.py): from its start
to ready, with kernels still to be compiled and with kernels on disk; the next 8 tokens; steps at batches 1 to 32 and
what was compiled or captured meanwhile; the time to the first token; gaps under Poisson arrivals at half and at 80 % of
the throughput. Compiled kernels and what was found are kept in --cache for the next call; `--fill` compiles those of
all cases beforehand, side by side, over members of two layers, whose kernels are the same: no case is then run cold.
Written to results/gpu-latency.json and results/gpu-latency-cases.json as soon as each is there; what does not begin
within --seconds is left out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar

import tessellm
from first_token import FirstToken
from latency_case import EXPERTS, Case, Run
from reference_overhead import RESULTS
from server_latency import LIMIT
from tessellm_lab.common.claims import Claim, Result, at_least, at_most

NAMES = {"first": "gpu-latency", "cases": "gpu-latency-cases"}  # of the results of each part
FIRST = {"full": 8.0, "lora": 5.0}  # ms to the first token of a prompt of 128, at most
LORA_STEP = 2.0  # ms per step of a base and three LoRA experts, at most
FEW_LAYERS = 2  # one of each kind: with a sliding window, and without
CASES = [("lora", "mixture"), ("full", "mixture"), ("full", "product"), ("lora", "product")]


def claims(found: dict[str, dict[str, Any]]) -> list[Claim]:
    made: list[Claim] = []
    for name, case in found.items():
        if name.startswith("first "):
            made += first_claims(name, case)
            continue
        kind, _, cache = name.split()
        ready = round(case["ready_beyond_loading_seconds"], 1)
        what = f"{name}: seconds from loaded weights to ready"
        made.append(
            at_most(f"ready-{name}", what, ready, 20) if cache == "warm" else Claim(f"ready-{name}", what, ready)
        )
        if "late" not in case:
            continue
        above = sum(batch["above"] for batch in case["steps"].values())
        steps = sum(batch["steps"] for batch in case["steps"].values())
        first = round(case["first_token_ms"]["128"], 2)
        share, over = round(case["long_prompt_share_of_matrix_rate"], 3), round(case["load_0.8"]["p99_over_median"], 2)
        made += [
            at_most(f"late-{name}", f"{name}: compilations and captures after ready", case["late"], 0),
            at_most(f"steps-{name}", f"{name}: of {steps:,} steps, those above {LIMIT:g} medians", above, 0),
            at_most(f"first-{name}", f"{name}: ms to the first token, prompt 128", first, FIRST[kind]),
            at_least(f"long-{name}", f"{name}: a long prompt, share of the matrix rate", share, 0.5),
            at_most(f"gaps-{name}", f"{name}: 80 % load, 99 % of gaps over the median", over, LIMIT),
        ]
        if kind == "lora":
            median = round(case["steps"]["1"]["median"], 2)
            what = f"{name}: ms per step at batch 1, base and three experts, texts of 128 to 1,028 tokens"
            made.append(Claim(f"step-{name}", what, median))
    return made


def first_claims(name: str, found: dict[str, Any]) -> list[Claim]:
    """What was found by engines that prepare little."""
    kind, made = name.split()[1], []
    for what, value in found.items():
        if what.startswith("128 "):
            id, text, ms = f"{kind} {what}", f"{kind}: ms to the first token, {what}", round(value["ms"], 2)
            fused = what.endswith("fused")
            made.append(at_most(id, text, ms, FIRST[kind]) if fused else Claim(id, text, ms))
            if kind == "lora" and fused and "graph decode ms" in value:
                step = f"base and three LoRA experts: the device's ms per step at batch 1, {what.split()[1]}"
                made.append(at_most(f"{id} step", step, round(value["graph decode ms"], 2), LORA_STEP))
        elif what.endswith(("fused", "modules")):
            share, text = round(value["share_of_matrix_rate"], 3), f"{kind}: share of the matrix rate, {what}"
            id = f"{kind} {what}"
            made.append(at_least(id, text, share, 0.5) if what.endswith("fused") else Claim(id, text, share))
    return made


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shapes", default="gemma-2-2b")
    parser.add_argument("--quick", action="store_true", help="few steps")
    parser.add_argument("--parts", default=",".join(NAMES), help="first, cases, or both")
    parser.add_argument("--only", action="append", help="a case such as 'lora mixture', or a kind for the first token")
    parser.add_argument("--steps", type=int, default=10_000, help="of each case")
    parser.add_argument("--cache", type=Path, help="a folder for compiled kernels and findings, kept for the next call")
    parser.add_argument("--fill", action="store_true", help="compile the kernels of all cases first, side by side")
    parser.add_argument("--layers", type=int, help="of members, fewer than the shapes have")
    parser.add_argument("--seconds", type=float, default=250, help="after which no other process begins")
    parser.add_argument("--process", help="one of them in this process (the script itself asks for that)")
    parser.add_argument("--began", type=float, default=time.time())
    return parser.parse_args()


def planned(given: argparse.Namespace, cache: Path) -> Iterator[str]:
    """Name the processes in order, the most important first. A case whose kernels are on disk is not run cold."""
    wanted = given.only or []
    if "first" in given.parts.split(","):
        yield from (f"first {kind}" for kind in EXPERTS if not wanted or any(kind in each for each in wanted))
    for case in wanted_cases(given):
        if not filled(case, cache).exists():
            yield f"{case} cold"
        yield f"{case} warm"


def wanted_cases(given: argparse.Namespace) -> list[str]:
    names = [f"{kind} {rule}" for kind, rule in CASES if "cases" in given.parts.split(",")]
    return [name for name in names if not given.only or name in given.only]


def filled(name: str, cache: Path) -> Path:
    """The file that says that a case's kernels are on disk."""
    return cache / f"{'-'.join(name.split()[:2])}.filled"


def fill(given: argparse.Namespace, cache: Path) -> None:
    """Compile the kernels of all cases, each in a process of its own, over members of few layers."""
    few = argparse.Namespace(**{**vars(given), "layers": FEW_LAYERS})
    names = [name for name in wanted_cases(given) if not filled(name, cache).exists()]
    running = [start_process(f"{name} cold", few, cache) for name in names]
    for name, process in zip(names, running, strict=True):
        _, errors = process.communicate()
        print(f"filled for {name}" if not process.returncode else f"not filled for {name}: {errors[-500:]}", flush=True)
        if not process.returncode:
            filled(name, cache).touch()


def start_process(name: str, given: argparse.Namespace, cache: Path) -> subprocess.Popen[str]:
    folders = {variable: str(cache / variable) for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    command = [sys.executable, __file__, "--device", given.device, "--shapes", given.shapes, "--process", name]
    command += ["--began", str(time.time()), "--steps", str(given.steps), *(["--quick"] if given.quick else [])]
    command += ["--layers", str(given.layers)] if given.layers else []
    pipe, environ = subprocess.PIPE, {**os.environ, **folders}
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environ)


def run_process(name: str, given: argparse.Namespace, cache: Path) -> dict[str, Any]:
    """Run one of them; its last line is what it found so far, even where it did not come to its end."""
    process = start_process(name, given, cache)
    output, errors = process.communicate()
    lines = [line for line in output.splitlines() if line.startswith("{")]
    if process.returncode and not lines:
        raise RuntimeError(errors.strip()[-2000:])
    found: dict[str, Any] = json.loads(lines[-1])
    if slower := [line for line in errors.splitlines() if "which is slower" in line]:
        found["not as planned"] = slower
        print(f"{name}: {slower}", flush=True)
    if process.returncode:
        found["error"] = errors.strip()[-2000:]
    elif name.endswith(("cold", "warm")):
        filled(name, cache).touch()
    return found


def run_here(name: str, given: argparse.Namespace) -> None:
    """Do what one process does."""
    disable_progress_bar()
    kind, *rest = name.split()
    if kind == "first":
        found: dict[str, Any] = {}
        for what, value in FirstToken(rest[0], given).all():
            found[what] = value
            print(json.dumps(found), flush=True)
        return
    run = Run(Case(kind, *rest), given)
    print(json.dumps(run.found), flush=True)
    if rest[-1] == "warm":
        print(json.dumps(run.all()))


def hash_of_sources() -> str:
    """What tells apart findings of different code, where a copy of the repository does not know its commit."""
    found = hashlib.sha256()
    for path in sorted(Path(tessellm.__file__).parent.rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()


def part_of(name: str) -> str:
    return "first" if name.startswith("first ") else "cases"


def main() -> None:
    given = arguments()
    if given.process:
        run_here(given.process, given)
        return
    start, failed = time.perf_counter(), {}
    with tempfile.TemporaryDirectory() as temporary:
        cache = given.cache or Path(temporary)
        cache.mkdir(parents=True, exist_ok=True)
        kept, sources = cache / "found.json", hash_of_sources()
        before = json.loads(kept.read_text()) if kept.exists() else {}
        found: dict[str, Any] = before["found"] if before.get("sources") == sources else {}
        if given.fill:
            fill(given, cache)
        for name in planned(given, cache):
            if time.perf_counter() - start > given.seconds:
                print(f"{name}: no time is left")
                continue
            try:
                found[name] = run_process(name, given, cache)
                kept.write_text(json.dumps({"sources": sources, "found": found}))
            except RuntimeError as error:
                failed[name] = str(error)
                print(f"{name} failed: {error}")
            seconds, part = round(time.perf_counter() - start, 1), part_of(name)
            own = {other: value for other, value in found.items() if part_of(other) == part}
            size = "cpu" if given.device == "cpu" else "full"
            result = Result(NAMES[part], claims(own), 0, size, seconds, tables={"cases": own, "failed": failed})
            result.write(RESULTS)
            print(f"{seconds:.0f} s, {name}: {json.dumps(found.get(name))}", flush=True)
    for claim in claims(found):
        print(f"{claim.statement}: {claim.value}" + (f" (target {claim.target})" if claim.target else ""))


if __name__ == "__main__":
    main()
