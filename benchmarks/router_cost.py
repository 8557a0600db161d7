"""What the router's energies cost: prefill of a prompt by the base with and without the tap.

    python benchmarks/router_cost.py --adapters DIR [DIR …] [--base smollm2] [--tokens 512] [--json PATH]

Experts adapt the layers that the adapters in DIR name, once each (and over and over for more experts); their directions
are random, which costs the same. FLOPs for Gemma-2-2b are counted by its shapes, every layer adapted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from tessellm.members import Loading, MemberSpec, load_member
from tessellm.provenance import environment
from tessellm.routing.directions import ROWS, count_blocks, linear_layers
from tessellm.routing.energy import Energies, plan_blocks, shared_inputs, stack_directions, tapped

COUNTS, RUNS = (20, 100), 7
GEMMA_2_2B = {"blocks": 26, "inputs": [2304] * 3 + [2048] + [2304] * 2 + [9216], "weights": 77_856_768}  # of a block


def experts_like(base: Any, modules: list[set[str]], count: int, blocks: list[int]) -> list[dict[str, torch.Tensor]]:
    """Random directions of experts at the layers whose names end as given."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for names in itertools.islice(itertools.cycle(modules), count):
        own = {}
        for path, layer in linear_layers(base).items():
            if path.rpartition(".")[2] in names and int(path.split(".layers.")[1].split(".")[0]) in blocks:
                rows = torch.randn(ROWS, layer.in_features, generator=generator)
                own[path] = torch.nn.functional.normalize(rows, dim=-1)
        found.append(own)
    return found


@torch.inference_mode()
def prefill_seconds(base: Any, ids: torch.Tensor) -> float:
    began = time.perf_counter()
    base.base_model(input_ids=ids, use_cache=True)
    return time.perf_counter() - began


def measure(base: Any, modules: list[set[str]], count: int, ids: torch.Tensor) -> dict[str, Any]:
    """Return prefill times with and without the tap, runs alternating."""
    blocks = plan_blocks(count_blocks(base), count)
    own = experts_like(base, modules, count, blocks)
    groups = shared_inputs(base, sorted({path for each in own for path in each}))
    stacked = stack_directions(groups, own, blocks)
    energies, times = Energies(stacked, count), {"plain": [], "tapped": []}
    for run in range(RUNS + 1):
        times["plain"].append(prefill_seconds(base, ids))
        with tapped(base, energies, list(stacked)):
            times["tapped"].append(prefill_seconds(base, ids))
        energies.take()
        if run == 0:
            times = {"plain": [], "tapped": []}  # the first warms up
    plain, with_tap = (statistics.median(times[key]) for key in ("plain", "tapped"))
    rows = sum(each.rows_RI.numel() for each in stacked.values())
    return {"experts": count, "blocks": len(blocks), "weights": rows, "seconds": times, "share": with_tap / plain - 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapters", type=Path, nargs="+", required=True)
    parser.add_argument("--base", default="smollm2")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    base = load_member("base", MemberSpec(given.base), None, Loading(dtype="float32")).model
    configs = [json.loads(file.read_text()) for root in given.adapters for file in root.glob("*/adapter_config.json")]
    modules = [set(config["target_modules"]) for config in configs]
    ids = torch.randint(100, 1000, (1, given.tokens), generator=torch.Generator().manual_seed(0))
    result: dict[str, Any] = {**environment(), "tokens": given.tokens, "cases": []}
    for count in COUNTS:
        case = measure(base, modules, count, ids)
        result["cases"].append(case)
        print(f"{count} experts, {case['blocks']} blocks: prefill +{case['share']:.1%}")
    blocks = plan_blocks(GEMMA_2_2B["blocks"], 20)
    share = 20 * ROWS * sum(GEMMA_2_2B["inputs"]) * len(blocks) / (GEMMA_2_2B["weights"] * GEMMA_2_2B["blocks"])
    result["gemma-2-2b, 20 experts, share of products"] = share
    print(f"Gemma-2-2b's shapes, 20 experts: {share:.1%} of the base's products")
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
