"""What the choices of the fused kernels bring, one by one: milliseconds of a pass of all members, without the rule.

    python benchmarks/fused_pass.py                            one GPU, google/gemma-2-2b's shapes, two minutes
    TRITON_INTERPRET=1 python benchmarks/fused_pass.py --toy   that it runs, in Triton's interpreter

Each line is one choice changed: launches that overlap, who makes what deltas need, cells of a split, outputs of a
program. Beside it is the time that reading all weights once takes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from first_token import changed, replayed_ms
from random_models import base_alone, random_composition
from reference_overhead import RESULTS
from tessellm.bench.measure import bandwidth
from tessellm.engine.cuda.fused import decoder, layers, overlap
from tessellm.engine.cuda.slot_pass import TokenBatch, member_logits
from tessellm.engine.members.groups import make_groups
from tessellm.files import write_text
from tessellm.members.shared_tensors import unique_bytes
from tessellm.provenance import environment

CHOICES: dict[str, dict[tuple[Any, str], Any]] = {
    "as it is": {},
    "launches in turn": {(overlap, "ALLOWED"): False},
    "products in turn": {(layers, "EARLY_ROWS"): 0},
    "products of up to 64 rows early": {(layers, "EARLY_ROWS"): 64},
    "deltas added by the splits": {(layers, "ROWS_APART"): 0},
    "64 parts for each program of deltas": {(layers, "PARTS_APART"): 64},
    "32 cells at once": {(decoder, "FEW_QUERIES"): 0},
    "32 cells a split": {(decoder, "FEWER_CELLS"): 32},
    "norms make no low": {(decoder, "FEW_ROWS"): 0},
    "128 cells a split": {(decoder, "FEWER_CELLS"): 128},
    "blocks of 32 outputs": {(layers, "WIDEST_BLOCK"): 32},
    "four programs a multiprocessor": {(layers, "PROGRAMS"): 528},
}


def timed(work: Callable[[], Any], device: str, rounds: int) -> float:
    """Milliseconds of one pass: the median over replays of a graph, or over calls where there is no GPU."""
    if device == "cpu":
        since = time.perf_counter()
        work()
        return (time.perf_counter() - since) * 1e3
    return replayed_ms(work, rounds, replays=4)


@torch.no_grad()
def passes(model: Any, slots: int, device: str, rounds: int, cells: int, limit: float) -> dict[str, Any]:
    (group,) = make_groups(model, slots=slots, cells=cells, stacked=True)
    members = [model.member(name) for name in model.members]
    one = torch.zeros(1, 1, dtype=torch.long, device=device)
    member_logits([group], TokenBatch(one, one, one[0], 1))  # makes the cache
    fused = group.fused if group.fused is not None else decoder.fuse(members, group.cache)
    assert fused is not None
    token_MBT = torch.full((len(members), slots, 1), 5, device=device)
    position_BT = torch.full((slots, 1), cells - 2, device=device)
    found: dict[str, Any] = {"limit_ms": unique_bytes(members) / limit * 1e3}
    wanted = fused(token_MBT, position_BT, cells)
    for name, choice in CHOICES.items():
        with changed(choice):
            try:
                far = (fused(token_MBT, position_BT, cells) - wanted).abs().max().item()
                found[name] = {"ms": timed(lambda: fused(token_MBT, position_BT, cells), device, rounds), "far": far}
            except Exception as error:  # one that does not fit
                found[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(f"  {name}: {found[name]}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--only", choices=("lora", "full"), action="append", help="one kind; both without it")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    device = "cpu" if given.toy else "cuda"
    shape, dtype = ("gemma-tiny", torch.float32) if given.toy else ("gemma-2-2b", torch.bfloat16)
    limit = 1e10 if given.toy else bandwidth(torch.device(device))
    cases: dict[str, Any] = {}
    for kind, experts in (("lora", 3), ("full", 2)):
        if given.only and kind not in given.only:
            continue
        whole = random_composition(shape, experts, kind, "mixture", device, dtype)
        beside = {
            "lora": ("base alone", base_alone(whole), 4),
            "full": ("full, 2 experts", whole, 2 if given.toy else 32),
        }
        for name, model, slots in ((f"{kind}, {experts} experts", whole, 1), beside[kind]):
            print(f"{name}, {slots} rows", flush=True)
            cases[f"{name}, {slots} rows"] = passes(model, slots, device, 3 if given.toy else 20, 192, limit)
    content = {"name": "fused-pass", "cases": cases, "bytes_a_second": limit, **environment()}
    write_text(given.out / "fused-pass.json", json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
