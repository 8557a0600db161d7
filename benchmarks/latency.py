"""What users of a server feel: a chat model and five LoRA experts of it, and its base alone, by the same server; on a
CPU also by vLLM where `make test-vllm` has installed it. Real processes and streams, Poisson arrivals.

    python benchmarks/latency.py                                  # SmolLM2 on a CPU
    python benchmarks/latency.py FOLDER --slots 8 --requests 40   # any composition, or one member of it (FOLDER:MEMBER)

Writes results/latency.json of SmolLM2, else latency.json here.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tessellm
from reference_overhead import RESULTS
from served import served, served_by_vllm
from server_latency import LIMIT, LatencyPlan, measure_latency
from tessellm.errors import EngineError
from tessellm.load import split_speaker
from tessellm_lab.common.claims import Claim, Result, at_most

HOME = Path(__file__).resolve().parent.parent
EXPERTS = ("math", "bash", "intents", "sql", "code")
VLLM = HOME / ".venv-vllm" / "bin" / "python"
Progress = Callable[[str], None]


def smollm2(folder: Path) -> str:
    """Compose the demo's members, once: measuring their habits takes a while. With all weights in the folder, since the
    base comes as a quantised file, which vLLM does not read as a member."""
    adapters = {name: str(HOME / "adapters" / "smollm2" / name) for name in EXPERTS}
    tessellm.compose("smollm2", adapters).save_pretrained(folder, self_contained=True)
    return str(folder)


def compare_latency(
    model: str, plan: LatencyPlan, vllm: Path | None = None, progress: Progress = lambda text: None
) -> dict[str, Any]:
    """Measure a composition and its base, or one member, each by a server of its own; `vllm`: the Python of an
    environment that has it, for a composition's folder."""
    path, member = split_speaker(model)
    servers: dict[str, Any] = {member or "composition": lambda: served(model, plan.slots, plan.context)}
    if member is None:
        servers["base alone"] = lambda: served(f"{path}:base", plan.slots, plan.context)
    if vllm is not None:
        servers["vLLM"] = lambda: served_by_vllm(vllm, model, plan.slots, plan.context)
    busy, rows = os.getloadavg()[0] if hasattr(os, "getloadavg") else None, {}
    for name, start in servers.items():
        try:
            with start() as server:
                rows[name] = measure_latency(server, plan, lambda text, name=name: progress(f"{name}: {text}"))  # type: ignore[misc]
        except EngineError as error:
            if name != "vLLM":
                raise
            progress(f"vLLM is left out: {error}")
    return {"plan": asdict(plan), "limit": LIMIT, "load_average_before": busy, "servers": rows}


def claims_of(found: dict[str, Any]) -> list[Claim]:
    """The ratio of gaps under every load, and what there is to know beside."""
    claims = []
    for name, server in found["servers"].items():
        for load in found["plan"]["loads"]:
            row = server[f"load_{load:g}"]
            what = f"{name}, {load:.0%} of its throughput"
            over = round(row["p99_over_median"], 2)
            id, stated = f"gaps-{name}-{load:g}", f"{what}: 99 % of gaps over the median gap"
            claims.append(Claim(id, stated, over) if name == "vLLM" else at_most(id, stated, over, LIMIT))
            for key, quantity in (("gap_ms", "gap"), ("first_token_ms", "time to first token")):
                value = {each: round(number) for each, number in row[key].items()}
                claims.append(Claim(f"{key}-{name}-{load:g}", f"{what}: {quantity}, ms", value))
        started = round(server["ready_seconds"], 1)
        claims.append(Claim(f"ready-{name}", f"{name}: seconds from process start to ready", started))
    return claims


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a composition's folder; by default SmolLM2 and its experts")
    parser.add_argument("--requests", type=int, default=24, help="per load")
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--vllm", type=Path, default=VLLM, metavar="PYTHON", help="of an environment that has vLLM")
    given = parser.parse_args()
    start, plan = time.perf_counter(), LatencyPlan(requests=given.requests, new=given.new_tokens, slots=given.slots)
    vllm = given.vllm if given.vllm.exists() else None
    with tempfile.TemporaryDirectory() as place:
        model = given.model or smollm2(Path(place) / "smollm2")
        found = compare_latency(model, plan, vllm, lambda text: print(text, flush=True))
    if vllm is None:
        print("vLLM is not installed (make test-vllm): left out")
    machine = {"cores": os.cpu_count(), "load_average_after": os.getloadavg()[0]}
    claims, seconds = claims_of(found), round(time.perf_counter() - start, 1)
    result = Result("latency", claims, plan.seed, "cpu", seconds, tables={**found, "machine": machine})
    result.write(Path() if given.model else RESULTS)
    for claim in claims:
        print(f"{claim.statement}: {claim.value}" + (f" (target {claim.target})" if claim.target else ""))


if __name__ == "__main__":
    main()
