"""Which layout of the fused linear kernel is fastest, at the layers of google/gemma-2-2b. Needs a GPU.

Prints microseconds and the share of the copy bandwidth measured in the same run, for every layout and layer, at one row
of three stacked members and at four rows of one shared weight. `_settings` in fused/layers.py follows it.
"""

from __future__ import annotations

import itertools
import sys

import torch
import triton

from tessellm.decoding.fused import layers
from tessellm.experiments.rule_cost import bandwidth

LAYERS = {"qkv": (2304, 4096, 0), "o": (2048, 2304, 0), "mlp": (2304, 9216, 2), "down": (9216, 2304, 0)}
HEAD = {"head": (2304, 256_000, 0)}


def modules(k: int, n: int, glu: int, members: int, copies: int) -> list[list[list[torch.nn.Linear]]]:
    """Enough copies that the weights do not stay in the chip's own memory."""

    def linear() -> torch.nn.Linear:
        layer = torch.nn.Linear(k, n, bias=False, device="cuda", dtype=torch.bfloat16)
        return layer.requires_grad_(False)

    return [[[linear() for _ in range(2 if glu else 1)] for _ in range(members)] for _ in range(copies)]


def measure(name: str, shared: bool, limit: float) -> None:
    k, n, glu = (LAYERS | HEAD)[name]
    members, slots = (4, 1) if shared else (3, 1)
    own = modules(k, n, glu, 1 if shared else members, 1 if name == "head" else 4)
    made = [
        layers.FusedLinear([each[0]] * members if shared else each, None, glu=glu, out_dtype=torch.bfloat16)
        for each in own
    ]
    x = torch.randn(members, slots, k, device="cuda", dtype=torch.bfloat16)
    floor = (1 if shared else members) * k * n * 2 * (2 if glu else 1) / limit * 1e6
    best = []
    for block_k, warps, stages in itertools.product((128, 256, 512), (2, 4, 8), (3, 4, 6)):
        if 16 * block_k * 2 * stages * (2 if glu else 1) > 200_000:
            continue
        layers._settings = lambda *_, k=block_k, w=warps, s=stages: {"BLOCK_K": k, "num_warps": w, "num_stages": s}  # type: ignore[assignment]
        try:
            time = triton.testing.do_bench_cudagraph(lambda: [each(x) for each in made], rep=5) * 1e3 / len(made)
        except Exception as error:  # a layout that does not fit
            print(name, block_k, warps, stages, str(error)[:60])
            continue
        best.append((time, block_k, warps, stages))
    best.sort()
    for time, *layout in best[:4]:
        print(
            f"{name:5} {'4 rows' if shared else '3 members'}: {time:7.1f} µs, {floor / time:.2f} of the limit, {layout}"
        )
    sys.stdout.flush()


if __name__ == "__main__":
    limit = bandwidth()
    print(f"{limit / 1e12:.2f} TB/s")
    for shared, name in itertools.product((False, True), [*LAYERS, *HEAD]):
        measure(name, shared, limit)
