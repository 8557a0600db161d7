"""What users of a server feel: a chat model and five LoRA experts of it, and its base alone, by the same server; on a
CPU also by vLLM where `make test-vllm` has installed it. Real processes and streams, Poisson arrivals.

    python benchmarks/latency.py            # SmolLM2 on a CPU
    python benchmarks/latency.py FOLDER     # any composition

Writes results/latency.json.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import tessellm
from reference_overhead import RESULTS
from tessellm.bench.compared import compare_latency
from tessellm.bench.latency import LIMIT, LatencyPlan
from tessellm.experiments.lab.claims import Claim, Result, at_most

HOME = Path(__file__).resolve().parent.parent
EXPERTS = ("math", "bash", "intents", "sql", "code")
VLLM = HOME / ".venv-vllm" / "bin" / "python"
PLAN = LatencyPlan(requests=24, new=24, slots=4)


def smollm2(folder: Path) -> str:
    """Compose the demo's members, once: measuring their habits takes a while. With all weights in the folder, since the
    base comes as a quantised file, which vLLM does not read as a member."""
    adapters = {name: str(HOME / "adapters" / "smollm2" / name) for name in EXPERTS}
    tessellm.compose("smollm2", adapters).save_pretrained(folder, self_contained=True)
    return str(folder)


def claims_of(found: dict[str, Any]) -> list[Claim]:
    """The ratio of gaps under every load, and what there is to know beside."""
    claims = []
    for name, server in found["servers"].items():
        for load in PLAN.loads:
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
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        model = sys.argv[1] if len(sys.argv) > 1 else smollm2(Path(place) / "smollm2")
        found = compare_latency(model, PLAN, VLLM if VLLM.exists() else None, lambda text: print(text, flush=True))
    if not VLLM.exists():
        print("vLLM is not installed (make test-vllm): left out")
    machine = {"cores": os.cpu_count(), "load_average_after": os.getloadavg()[0]}
    claims, seconds = claims_of(found), round(time.perf_counter() - start, 1)
    Result("latency", claims, PLAN.seed, "cpu", seconds, tables={**found, "machine": machine}).write(RESULTS)
    for claim in claims:
        print(f"{claim.statement}: {claim.value}" + (f" (target {claim.target})" if claim.target else ""))


if __name__ == "__main__":
    main()
