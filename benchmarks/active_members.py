"""What a composition costs beside its base alone, by the same engine: SmolLM2 and 5, 20 or 50 LoRA experts on a CPU.

    python benchmarks/active_members.py tokens --experts 20    first and later tokens, of an expert or of the base
    python benchmarks/active_members.py memory --experts 20    memory over the base's
    python benchmarks/active_members.py server                 requests per second, and gaps between tokens
    python benchmarks/active_members.py base --old FOLDER      the base alone, beside another commit's checkout

Both sides take turns in one run; medians of ratios count. The experts are five of adapters/smollm2, fifteen of
`--adapters`, and copies of these with seeded noise. Each part writes its rows into results/active-members.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

import tessellm
from active_members_claims import claims_of
from active_members_experts import SMOLLM2, asked_of, experts_of
from reference_overhead import RESULTS
from served import served
from server_latency import LatencyPlan, measure_latency
from tessellm.bench.measure import random_prompts, timed_texts
from tessellm.engine.engine import Engine
from tessellm.load import load_model
from tessellm.model import ComposedForCausalLM
from tessellm.model.variants import alone
from tessellm.provenance import environment
from tessellm.routing.calibration import calibration_prompts
from tessellm.routing.profiles import ExpertToRoute
from tessellm.routing.route import Route, RoutedPrompt
from tessellm.routing.router import DeltaRouter
from tessellm_lab.common.claims import Result

HOME = Path(__file__).resolve().parent.parent
NAME, DTYPE = "active-members", "float32"
PROMPTS, NEW, ROUNDS, CALIBRATED = (64, 256), 17, 9, 48
CLIENTS, WRITTEN = 8, 64


class ChosenRoute:
    """A router that does all of its work, and then says what it was told to say."""

    def __init__(self, router: DeltaRouter):
        self.router, self.selected = router, "base"

    def tap(self, base: nn.Module) -> Any:
        return self.router.tap(base)

    def route(self, prompts: Sequence[RoutedPrompt]) -> list[Route]:
        return [Route({self.selected: 1.0}, self.selected, route.scores) for route in self.router.route(prompts)]


def composed(experts: Mapping[str, Path]) -> ComposedForCausalLM:
    """Compose, with a router that is calibrated on few prompts: what it costs does not depend on them."""
    model = tessellm.compose(
        "smollm2", {name: str(place) for name, place in experts.items()}, router=False, dtype=DTYPE
    )
    to_route = {name: ExpertToRoute(model.member(name), f"Answers like {name}.", ()) for name in experts}
    router = DeltaRouter.calibrate(model.base, model.tokenizer, to_route, prompts=calibration_prompts()[:CALIBRATED])
    model.router = ChosenRoute(router)
    return model


def tokens(count: int, adapters: Path) -> dict[str, Any]:
    """First and later tokens over the base alone, in turns: of an expert, and of the base where it is left alone."""
    with experts_of(count, adapters) as experts:
        model = composed(experts)
    longest = max(PROMPTS) + NEW
    base, engine = Engine(alone(model, "base"), 1, longest), Engine(model, 1, longest)
    rows, names = {}, list(experts)
    freeze()
    for length in PROMPTS:
        found: dict[str, list[float]] = {}
        for turn in range(ROUNDS + 1):  # the first is not counted
            prompt = random_prompts(model, [length], turn)
            took = {"base": timed_texts(base, prompt, NEW)}
            for key, selected in (("expert", names[turn % len(names)]), ("left", "base")):
                model.router.selected = selected  # type: ignore[union-attr]
                took[key] = timed_texts(engine, prompt, NEW)
            assert took["left"].texts == took["base"].texts
            for key, each in took.items() if turn else ():
                found.setdefault(f"{key} first", []).append(each.first)
                found.setdefault(f"{key} step", []).append(each.step)
        rows[str(length)] = over_base(found)
    return {"experts": count, "dtype": DTYPE, "prompts": rows}


def over_base(found: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    row: dict[str, Any] = {f"{key} ms": 1e3 * statistics.median(values) for key, values in found.items()}
    for key, values in found.items():
        who, what = key.split()
        if who != "base":
            row[f"{key} over base"] = statistics.median(map(float.__truediv__, values, found[f"base {what}"]))
    return row


def freeze() -> None:
    """As the server does: what was loaded is not searched for garbage again."""
    gc.collect()
    gc.freeze()


def memory(count: int, adapters: Path) -> dict[str, Any]:
    """Memory of a process that wrote by every member, over one with the base alone."""
    with experts_of(count, adapters) as experts:
        places = json.dumps({name: str(place) for name, place in experts.items()})
        base, whole = (
            json.loads(subprocess.run([sys.executable, __file__, "one", given], check=True, capture_output=True).stdout)
            for given in ("{}", places)
        )
    return {"experts": count, "base_mib": base["mib"], "mib": whole["mib"], "adapters_mib": whole["adapters_mib"]}


def one_process(experts: Mapping[str, Path]) -> dict[str, float]:
    """Write a text by every member, and by the router's choice; return what the process holds."""
    first = SMOLLM2 / "math"  # a base alone is one member of a composition: what both load is the same
    model = composed(experts or {"math": first})
    engine = Engine(model if experts else alone(model, "base"), 4, 512)
    seen = {id(p): p for name in experts for path, p in model.member(name).named_parameters() if "lora_" in path}
    engine.generate(random_prompts(model, [64] * 4))
    for name in experts:
        engine.submit(random_prompts(model, [8])[0], experts={name: 1.0})
    while engine.busy:
        engine.step()
    gc.collect()
    mib = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    return {"mib": mib, "adapters_mib": sum(parameter.nbytes for parameter in seen.values()) / 2**20}


def server(adapters: Path, requests: int) -> dict[str, Any]:
    """The same requests to a server with five experts and to one with the base alone: half concern an expert."""
    with tempfile.TemporaryDirectory() as place, experts_of(5, adapters) as experts:
        folder = str(Path(place) / "smollm2")
        given = {name: str(path) for name, path in experts.items()}
        tessellm.compose("smollm2", given, dtype=DTYPE).save_pretrained(folder)
        texts = asked_of(load_model(folder).tokenizer, 2 + 2 * requests)
        plan = LatencyPlan(requests, WRITTEN, (64,), (0.8,), CLIENTS, texts=texts, ignore_eos=True)
        rows = {}
        for name, model in (("base alone", f"{folder}:base"), ("composition", folder)):
            with served(model, plan.slots, plan.context) as started:
                rows[name] = measure_latency(
                    started, plan, lambda text, name=name: print(f"{name}: {text}", flush=True)
                )
    return {"dtype": DTYPE, "experts": 5, "clients": CLIENTS, **rows}


def base_alone(old: Path, rounds: int = 4) -> dict[str, Any]:
    """The base alone here and in another checkout, in turns, each in a process of its own."""
    script = Path(__file__).with_name("active_members_base.py")
    found: dict[str, list[dict[str, Any]]] = {"here": [], "old": []}
    for turn in range(rounds):
        for name, home in sorted((("here", HOME), ("old", old)), reverse=bool(turn % 2)):
            paths = os.pathsep.join(str(home / part) for part in ("src", "lab/src"))
            ran = subprocess.run(
                [sys.executable, script],
                check=True,
                capture_output=True,
                text=True,
                env={**os.environ, "PYTHONPATH": paths},
            )
            found[name].append(json.loads(ran.stdout.splitlines()[-1]))
    names = list(found["here"][0])
    return {name: {side: min(each[name] for each in rows) for side, rows in found.items()} for name in names}


def keep(part: str, rows: Mapping[str, Any], seconds: float) -> None:
    """Put a part's rows into the results file, with what they were measured on."""
    path = RESULTS / f"{NAME}.json"
    tables = json.loads(path.read_text())["tables"] if path.exists() else {}
    tables[part] = {**rows, "seconds": round(seconds, 1), "measured_on": environment()}
    claims = claims_of(tables)
    Result(NAME, claims, 0, "cpu", sum(table["seconds"] for table in tables.values()), tables=tables).write(RESULTS)
    for claim in claims:
        print(f"{claim.statement}: {claim.value}" + (f" (target {claim.target})" if claim.target else ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("tokens", "memory", "server", "base", "one"))
    parser.add_argument("members", nargs="?", help=argparse.SUPPRESS)  # of a process that `memory` starts
    parser.add_argument("--experts", type=int, default=5)
    parser.add_argument("--adapters", type=Path, default=HOME / "lab" / "adapters")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--old", type=Path, help="a checkout of the commit to compare with")
    given, start = parser.parse_args(), time.perf_counter()
    if given.part == "one":
        print(json.dumps(one_process({name: Path(place) for name, place in json.loads(given.members).items()})))
        return
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "tokens": lambda: tokens(given.experts, given.adapters),
        "memory": lambda: memory(given.experts, given.adapters),
        "server": lambda: server(given.adapters, given.requests),
        "base": lambda: base_alone(given.old),
    }
    rows = parts[given.part]()
    name = f"{given.part} {given.experts}" if given.part in ("tokens", "memory") else given.part
    keep(name, rows, time.perf_counter() - start)


if __name__ == "__main__":
    main()
