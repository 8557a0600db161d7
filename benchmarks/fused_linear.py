"""Which layout of the fused linear kernels is fastest, at the layers of google/gemma-2-2b. Needs a GPU.

Prints microseconds and the share of the copy bandwidth measured in the same run, for every layout and layer: one row of
three stacked members, four rows of one shared weight, 32 rows of three members. `thin_layout` and `wide_layout` in
fused/layers.py follow it. `warm LAYER CASE` only compiles, so that several processes can do so at once.
"""

from __future__ import annotations

import itertools
import subprocess
import sys

import torch
import triton

from tessellm.decoding.fused import layers
from tessellm.experiments.rule_cost import bandwidth

LAYERS = {"qkv": (2304, 4096, 0), "mlp": (2304, 9216, 2), "down": (9216, 2304, 0), "head": (2304, 256_000, 0)}
CASES = {
    "3 members": (3, 1, False, True),
    "4 rows": (4, 1, True, True),
    "4 rows, wide": (4, 1, True, False),
    "3 members, 32 rows": (3, 32, False, False),
}
THIN = [
    {"BLOCK_N": n, "BLOCK_K": k, "num_warps": w}
    for n, k, w in (
        (1, 1024, 4),
        (2, 512, 2),
        (2, 1024, 4),
        (4, 256, 4),
        (4, 512, 4),
        (4, 1024, 8),
        (8, 256, 4),
        (8, 512, 8),
    )
]
WIDE = [
    {"BLOCK_N": n, "BLOCK_K": k, "num_warps": w, "num_stages": s}
    for n, k, w, s in (
        (32, 128, 4, 4),
        (64, 64, 4, 5),
        (64, 128, 4, 4),
        (64, 128, 8, 4),
        (128, 64, 4, 4),
        (128, 64, 8, 4),
    )
]


def linear(k: int, n: int) -> torch.nn.Linear:
    return torch.nn.Linear(k, n, bias=False, device="cuda", dtype=torch.bfloat16).requires_grad_(False)


def measure(layer: str, case: str, limit: float | None) -> None:
    """Every layout of one layer; without a limit, compile only. Copies of the weights keep them out of the caches."""
    (k, n, glu), (members, slots, shared, thin) = LAYERS[layer], CASES[case]
    distinct = 1 if shared else members
    made = []
    for _ in range(1 if layer == "head" or limit is None else 4):
        own = [[linear(k, n) for _ in range(2 if glu else 1)] for _ in range(distinct)]
        gains = [torch.zeros(k, device="cuda", dtype=torch.bfloat16)] * members
        made.append(
            layers.FusedLinear(own * members if shared else own, gains if k == 2304 else None, glu=glu, eps=1e-6)
        )
    x = torch.randn(members, slots, k, device="cuda", dtype=torch.bfloat16)
    rows = members * slots if shared else slots
    layers.THIN = rows if thin else 0
    padded, found = triton.next_power_of_2(rows), []
    for layout in THIN if thin else WIDE:
        name = "thin_layout" if thin else "wide_layout"
        extra = {"BLOCK_R": padded} if thin else {"BLOCK_R": max(16, padded), "PRECISION": "ieee"}
        setattr(layers, name, lambda *_, layout=layout, extra=extra: {**layout, **extra})
        try:
            if limit is None:
                made[0](x)
                continue
            run = triton.testing.do_bench_cudagraph(lambda: [each(x) for each in made], rep=5)
            found.append((run * 1e3 / len(made), layout))
        except Exception as error:  # a layout that does not fit
            print(layer, case, layout, str(error)[:80])
    floor = distinct * k * n * 2 * (2 if glu else 1) / (limit or 1) * 1e6
    for time, layout in sorted(found, key=lambda pair: pair[0])[:4]:
        print(f"{layer:5} {case}: {time:7.1f} µs, {floor / time:.2f} of the limit, {layout}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["warm"]:
        measure(sys.argv[2], sys.argv[3], None)
    else:
        every = list(itertools.product(LAYERS, CASES))
        warming = [subprocess.Popen([sys.executable, __file__, "warm", *each]) for each in every]
        for process in warming:
            process.wait()
        limit = bandwidth()
        print(f"{limit / 1e12:.2f} TB/s", flush=True)
        for layer, case in every:
            measure(layer, case, limit)
