"""All that decoding is to show on one GPU, in one run: google/gemma-2-2b's shapes, random weights, bfloat16, greedy.

    python benchmarks/gpu_decoding.py --warm 6                                    meant for eight minutes of an H200
    python benchmarks/gpu_decoding.py --device cpu --shapes gemma-tiny --quick    the same in small, to see that it runs
    python benchmarks/gpu_decoding.py --draw                                      the figures of the last run again

Full models and LoRA experts against the notebook's loop and the limit of the memory, over batches, contexts and numbers
of experts; a profile of what is missing; tokens against the reference in float32; speculation on trained members. Every
item is written to results/gpu-decoding.json as soon as it is there; one that fails is reported, and the next one runs;
what does not begin within --seconds is left out. `--warm N` first lets N processes compile the kernels side by side, on
two layers.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

import speculation as trained_speculation
from decoding_figure import draw
from draft_distribution import draft_always
from equality import compared
from gpu_claims import claims
from random_models import base_alone, first_experts, random_composition
from reference_overhead import RESULTS
from step_profile import profiled
from tessellm.bench.measure import bandwidth, engine_steps, in_words, measure, random_prompts
from tessellm.engine.engine import Engine
from tessellm.engine.sampling import Sampling
from tessellm.engine.speculation import Speculation
from tessellm.members.shared_tensors import unique_bytes
from tessellm_lab.common.claims import Result
from tessellm_lab.common.loops import loop_steps

NAME = "gpu-decoding"
FULL, LORA = 3, 8  # the most experts of each kind
WARM_SECONDS = 120


@dataclass
class Bench:
    """What is measured, and on what. Compositions are made once."""

    shapes: str
    device: str
    dtype: torch.dtype
    layers: int | None
    rounds: int
    new: int
    loops: bool
    members: Path
    contexts: tuple[int, ...]
    counts: dict[int, int]  # of strings for the speculation's batches
    steps: int | None  # of training
    bandwidth: float | None  # None: measured
    kept: dict[str, Any] = field(default_factory=dict)

    def composition(self, kind: str, dtype: torch.dtype | None = None) -> Any:
        dtype, most = dtype or self.dtype, FULL if kind == "full" else LORA
        key = f"{kind} {dtype}"
        if key not in self.kept:
            if dtype != self.dtype:  # one such at a time
                self.kept = {key: each for key, each in self.kept.items() if str(self.dtype) in key}
                most = 2 if kind == "full" else 3
            self.kept[key] = random_composition(self.shapes, most, kind, "mixture", self.device, dtype, 0, self.layers)
        return self.kept[key]

    @cached_property
    def bytes_a_second(self) -> float:
        return self.bandwidth or bandwidth(torch.device(self.device))

    def row(self, model: Any, batch: int = 1, prompt: int = 128, loops: bool = False) -> dict[str, Any]:
        rows, short = random_prompts(model, [prompt] * batch), min(self.new, 24)
        beside = {
            "notebook": lambda: loop_steps(model, rows, short, to_cpu=True),
            "on_device": lambda: loop_steps(model, rows, short, to_cpu=False),
        }
        beside = beside if loops and self.loops else {}
        found = measure(model, batch, prompt, self.new, self.rounds, self.bytes_a_second, beside=beside)
        print(f"  {in_words(found)}", flush=True)
        return {**found, "rule": model.rule.name}

    def full(self, experts: int = 2, **case: Any) -> dict[str, Any]:
        return self.row(first_experts(self.composition("full"), experts), **case)

    def by_product(self) -> dict[str, Any]:
        model = first_experts(self.composition("full"), 2)
        model.set_rule("product")
        return self.row(model)

    def lora(self, experts: int = 3, **case: Any) -> dict[str, Any]:
        return self.row(first_experts(self.composition("lora"), experts), **case)

    def base(self) -> dict[str, Any]:
        return self.row(base_alone(self.composition("lora")), batch=4)

    def profile(self, kind: str, experts: int, batch: int = 1) -> dict[str, Any]:
        """Where a step's time goes; with no experts, that of the base alone."""
        whole = self.composition(kind)
        model = first_experts(whole, experts) if experts else base_alone(whole)
        rows = random_prompts(model, [128] * batch)
        found = profiled(Engine(model, batch, 128 + max(self.new, 40)), rows, self.new, steps=32)
        for line in found["kernels"][:8]:
            print(f"  {line['share']:6.1%} {line['ms']:.3f} ms {line['calls']:6.1f} × {line['kernel']}", flush=True)
        return found

    def memory(self) -> dict[str, Any]:
        """Bytes of the base alone at four rows and of base and three experts, weights and engines together."""
        whole = self.composition("lora")
        found = {}
        for name, model, batch in (("base", base_alone(whole), 4), ("lora", first_experts(whole, 3), 1)):
            before = torch.cuda.memory_allocated() if self.device == "cuda" else 0
            engine = Engine(model, batch, 128 + self.new)
            engine_steps(engine, random_prompts(model, [128] * batch), 4)
            cache = sum(group.cache.bytes for group in engine.executor.groups)
            engine_bytes = torch.cuda.memory_allocated() - before if self.device == "cuda" else cache
            weights = unique_bytes(model.members.values())
            found[name] = {"weights": weights, "engine": engine_bytes, "all": weights + engine_bytes}
            del engine
        return {**found, "ratio": found["lora"]["all"] / found["base"]["all"]}

    def equality(self, kind: str, dtype: torch.dtype, draft: str | None = None) -> dict[str, Any]:
        """Four prompts of unlike lengths, against the reference. Few kernels are compiled for it: the prompts are alike
        enough to be fed and decoded together, drafts are of one length, and their rule is not compiled."""
        whole = self.composition(kind, dtype)
        model = first_experts(whole, min(len(whole.members) - 1, 2 if kind == "full" else 3))
        drafts = Speculation(draft) if draft else None
        engine = Engine(model, 4, 128 + self.new, compiled=not draft, speculation=drafts)
        if draft:
            draft_always(engine, 3)
        requests = engine.generate(random_prompts(model, [128, 117, 102, 90]), Sampling(self.new, ignore_end=True))
        found = compared(model, requests)
        print(f"  {found}", flush=True)
        return found

    def speculation(self, draft: str, batch: int) -> dict[str, Any]:
        if "trained" not in self.kept:
            settings = trained_speculation.settings_for(self.device, self.steps)
            model, prompts = trained_speculation.composition("mixture", 0, settings, self.members, self.device)
            found = Engine(model, slots=16).generate(prompts, Sampling(trained_speculation.room(prompts)))
            right = trained_speculation.right_strings(found, trained_speculation.strings(0, settings))
            print(f"  {right:.0%} of the strings are right", flush=True)
            self.kept |= {"trained": (model, prompts), "right strings": right}
        model, prompts = self.kept["trained"]
        own = prompts[: self.counts[batch]]
        row = trained_speculation.compare(model, batch, draft, own, self.rounds, draws=self.loops)
        print(f"  {trained_speculation.in_words(draft, batch, row)}", flush=True)
        return {**row, "right_strings": self.kept["right strings"]}


def items(bench: Bench) -> dict[str, Callable[[], dict[str, Any]]]:
    """What is measured, the most important first."""
    found: dict[str, Callable[[], dict[str, Any]]] = {
        "full, batch 1": partial(bench.full, loops=True),
        "full, profile": partial(bench.profile, "full", 2),
        "full, batch 32": partial(bench.full, batch=32),
        "full, batch 32, profile": partial(bench.profile, "full", 2, 32),
        "lora, 3 experts": partial(bench.lora, 3),
        "base alone, 4 rows": bench.base,
        "lora, profile": partial(bench.profile, "lora", 3),
        "base alone, 4 rows, profile": partial(bench.profile, "lora", 0, 4),
        "lora, 1 experts": partial(bench.lora, 1),
        "lora, 8 experts": partial(bench.lora, 8),
        "memory": bench.memory,
        "equality, full, float32": partial(bench.equality, "full", torch.float32),
        "equality, full, float32, drafts": partial(bench.equality, "full", torch.float32, "lookup"),
        "equality, lora, float32": partial(bench.equality, "lora", torch.float32),
        f"equality, full, {str(bench.dtype)[6:]}": partial(bench.equality, "full", bench.dtype),
    }
    for kind, measured, counts in (("full", bench.full, (1, 3)), ("lora", bench.lora, (2, 5))):
        found |= {f"{kind}, prompt {prompt}": partial(measured, prompt=prompt) for prompt in bench.contexts}
        found |= {f"{kind}, {count} experts": partial(measured, count) for count in counts}
    found["full, batch 8"] = partial(bench.full, batch=8)
    found["full, Eq. 2"] = bench.by_product
    for batch in bench.counts:  # last, since they compile the most
        for draft in ("lookup",):
            found[f"speculation, {draft}, batch {batch}"] = partial(bench.speculation, draft, batch)
    return found


def draw_all(tables: dict[str, Any], out: Path) -> list[str]:
    drawn = []
    for kind in ("full", "lora"):
        rows = [row for name, row in tables.items() if name.startswith(f"{kind}, ") and row.get("rule") == "mixture"]
        if rows:
            draw({"rows": rows}, out / f"{NAME}-{kind}.png")
            drawn.append(f"{NAME}-{kind}.png")
    return drawn


def warm(count: int, arguments: list[str], names: list[str], members: Path) -> None:
    """Compile what will be needed, in processes side by side, on two layers: caches on disk keep it."""
    start = time.perf_counter()
    drafts = [name for name in names if name.startswith("speculation")]  # one process trains the members
    others = [name for name in names if name not in drafts and not name.endswith("profile")]
    shares = [share for share in ([drafts] + [others[n :: count - 1] for n in range(count - 1)]) if share]
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for number, share in enumerate(shares):
            only = [each for name in share for each in ("--only", name)]
            log = (Path(folder) / f"{number}.txt").open("w")
            command = [sys.executable, __file__, *arguments, "--layers", "2", "--rounds", "1", "--no-loops", *only]
            command += ["--out", folder + f"/{number}", "--members", str(members), "--bandwidth", "1e12"]
            running.append(subprocess.Popen(command, stdout=log, stderr=log))
        for process in running:
            try:
                process.wait(max(1.0, WARM_SECONDS - (time.perf_counter() - start)))
            except subprocess.TimeoutExpired:
                process.terminate()
                process.wait()
    print(f"kernels were compiled in {time.perf_counter() - start:.0f} s", flush=True)


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="gemma-2-2b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, help="fewer than the shapes have")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new", type=int, default=64, help="tokens after each prompt")
    parser.add_argument("--no-loops", action="store_true", help="nor draws of sampled texts: to compile what is needed")
    parser.add_argument("--quick", action="store_true", help="short contexts, little training: to see that it runs")
    parser.add_argument("--only", action="append", help="items by name; all without it")
    parser.add_argument("--seconds", type=float, default=450, help="nothing begins later than this")
    parser.add_argument("--warm", type=int, default=0, help="processes that compile before")
    parser.add_argument("--bandwidth", type=float, help="bytes a second, instead of measuring them")
    parser.add_argument("--members", type=Path, help="where trained members are kept")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--draw", action="store_true", help="only draw what is in the results")
    return parser


def main() -> None:
    given = options().parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.draw:
        draw_all(json.loads((given.out / f"{NAME}.json").read_text())["tables"], given.out)
        return
    start = time.perf_counter()
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        members = given.members or Path(folder) / "members"
        bench = Bench(
            given.shapes, given.device, torch.bfloat16 if given.device == "cuda" else torch.float32, given.layers,
            given.rounds, given.new, not given.no_loops, members,
            contexts=(256, 512) if given.quick else (1024, 4096, 8192 - given.new),
            counts={1: 2, 4: 4, 16: 16} if given.quick else trained_speculation.LARGE_BATCHES,
            steps=30 if given.quick else None,
            bandwidth=given.bandwidth,
        )  # fmt: skip
        todo = {name: run for name, run in items(bench).items() if given.only is None or name in given.only}
        if given.warm > 1:
            warm(given.warm, _passed_on(given), list(todo), members)
        tables: dict[str, Any] = {"bytes_a_second": bench.bytes_a_second}
        failed: dict[str, str] = {}
        for name, run in todo.items():
            began = time.perf_counter()
            if began - start > given.seconds:
                failed[name] = f"left out: {given.seconds:.0f} s were over"
                continue
            print(f"{began - start:5.0f} s  {name}", flush=True)
            try:
                tables[name] = {**run(), "seconds": time.perf_counter() - began}
            except Exception:
                failed[name] = traceback.format_exc()
                print(failed[name], file=sys.stderr, flush=True)
            _write(given, tables, failed, time.perf_counter() - start)
    try:
        figures = draw_all(tables, given.out)
    except Exception:
        figures, failed["figures"] = [], traceback.format_exc()
    result = _write(given, tables, failed, time.perf_counter() - start, figures)
    for claim in result.claims:
        print(f"{claim.id:>18}: {claim.value}   {claim.target or ''}   {claim.holds}")
    for name, why in failed.items():
        print(f"{name} FAILED: {why.strip().splitlines()[-1]}")


def _passed_on(given: argparse.Namespace) -> list[str]:
    same = ["--shapes", given.shapes, "--device", given.device, "--new", str(given.new)]
    return [*same, "--quick"] if given.quick else same


def _write(
    given: argparse.Namespace, tables: dict[str, Any], failed: dict[str, str], seconds: float, figures: Any = ()
) -> Result:
    kept = {**tables, "failed": failed} if failed else tables
    result = Result(NAME, claims(tables), 0, given.shapes, seconds, figures, kept)
    result.write(given.out)
    return result


if __name__ == "__main__":
    main()
