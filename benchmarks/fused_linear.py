"""Which layout of the fused linear kernels is fastest, at the layers of google/gemma-2-2b. Needs a GPU.

Prints microseconds and the share of the copy bandwidth measured in the same run, for every layout and layer: one row of
three stacked members, four rows of one shared weight, 32 rows of three members, and 128 and 256, as drafts and short
prompts have, there beside the library's products member by member. `layout_of` in fused/layers.py follows it.
`--case NAME` takes some of the cases; `warm LAYER CASE` only compiles, so that several processes can do so at once.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys

import torch
import triton

from tessellm.engine.cuda.fused import layers
from tessellm_lab.rule_cost.experiment import bandwidth

LAYERS = {
    "qkv": (2304, 4096, 0),
    "o": (2048, 2304, 0),
    "mlp": (2304, 9216, 2),
    "down": (9216, 2304, 0),
    "head": (2304, 256_000, 0),
}
CASES = {  # members, slots, whether all read one weight, whether sums are kept in registers
    "3 members": (3, 1, False, True),
    "3 members, wide": (3, 1, False, False),
    "4 rows": (4, 1, True, False),
    "3 members, 32 rows": (3, 32, False, False),
    "3 members, 128 rows": (3, 128, False, False),
    "3 members, 256 rows": (3, 256, False, False),
}
THIN = [
    {"BLOCK_N": n, "BLOCK_K": k, "num_warps": w}
    for n, k, w in ((2, 1024, 4), (4, 512, 4), (8, 256, 4), (8, 256, 8), (16, 256, 8))
]
WIDE = [
    {"BLOCK_N": n, "BLOCK_K": k, "num_warps": w, "num_stages": s}
    for n, k, w, s in ((16, 256, 4, 3), (32, 128, 4, 4), (64, 64, 4, 5), (64, 128, 8, 4), (128, 64, 4, 4))
]
MANY = [
    {"BLOCK_R": r, "BLOCK_N": n, "BLOCK_K": k, "num_warps": w, "num_stages": s}
    for r, n, k, w, s in (
        (64, 64, 64, 4, 5), (64, 128, 64, 4, 4), (128, 64, 64, 4, 4), (128, 64, 64, 8, 4), (128, 128, 64, 8, 3),
        (128, 128, 64, 8, 4), (128, 128, 32, 8, 4), (128, 256, 64, 8, 3),
    )
]  # fmt: skip
SPLITS = (1, 2, 4)


def linear(k: int, n: int) -> torch.nn.Linear:
    return torch.nn.Linear(k, n, bias=False, device="cuda", dtype=torch.bfloat16).requires_grad_(False)


def by_library(x_MBK: torch.Tensor, weights: list[list[torch.Tensor]]) -> torch.Tensor:
    """Member after member, as the modules do it; gate and up are two products."""
    return torch.stack([torch.cat([x @ part.T for part in own], -1) for x, own in zip(x_MBK, weights, strict=True)])


def measure(layer: str, case: str, limit: float | None) -> None:
    """Every layout of one layer; without a limit, compile only. Copies of the weights keep them out of the caches."""
    (k, n, glu), (members, slots, shared, thin) = LAYERS[layer], CASES[case]
    distinct = 1 if shared else members
    made, kept = [], []
    for _ in range(1 if layer == "head" or limit is None else 4):
        own = [[linear(k, n) for _ in range(2 if glu else 1)] for _ in range(distinct)]
        kept.append(own)
        made.append(layers.FusedLinear(own * members if shared else own, glu=glu))
    x = torch.randn(members, slots, k, device="cuda", dtype=torch.bfloat16)
    rows = members * slots if shared else slots
    padded, found = triton.next_power_of_2(rows), []
    layouts = THIN if thin else MANY if rows > layers.MOST_BLOCK_R else WIDE
    for layout, splits in itertools.product(layouts, (1,) if thin or glu or layer == "head" else SPLITS):
        extra = {"BLOCK_R": padded} if thin else {"BLOCK_R": max(16, padded), "PRECISION": "ieee"}
        fixed = layers.Layout(thin, splits, {**extra, **layout})
        layers.layout_of = lambda *_, fixed=fixed, **__: fixed  # type: ignore[assignment]
        try:
            if limit is None:
                made[0](x)
                continue
            run = triton.testing.do_bench_cudagraph(lambda: [each(x) for each in made], rep=5)
            found.append((run * 1e3 / len(made), {**layout, "splits": splits}))
        except Exception as error:  # a layout that does not fit
            print(layer, case, layout, str(error)[:80])
    if limit is not None and rows > layers.MOST_BLOCK_R:
        own = [[[part.weight for part in parts] for parts in weights] for weights in kept]
        run = triton.testing.do_bench_cudagraph(lambda: [by_library(x, each) for each in own], rep=5)
        print(f"{layer:5} {case}: {run * 1e3 / len(own):7.1f} µs by the library", flush=True)
    floor = distinct * k * n * 2 * (2 if glu else 1) / (limit or 1) * 1e6
    for time, layout in sorted(found, key=lambda pair: pair[0])[:2]:
        print(f"{layer:5} {case}: {time:7.1f} µs, {floor / time:.2f} of the limit, {layout}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=CASES, help="all without it")
    parser.add_argument("warm", nargs="*", metavar="warm LAYER CASE", help="only compile")
    given = parser.parse_args()
    if given.warm:
        measure(given.warm[1], given.warm[2], None)
        return
    every = list(itertools.product(LAYERS, given.case or CASES))
    warming = [subprocess.Popen([sys.executable, __file__, "warm", *each]) for each in every]
    for process in warming:
        process.wait()
    limit = bandwidth()
    print(f"{limit / 1e12:.2f} TB/s", flush=True)
    for layer, case in every:
        measure(layer, case, limit)


if __name__ == "__main__":
    main()
