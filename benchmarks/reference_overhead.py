"""What the reference path costs beside its members: composed forward against the sum of the members' own.

Three 8-layer, 512-wide Llamas with a vocabulary of 32,000 in float32. A decoding step and a prefill, composed and
by the members alone, in turns, so that whatever else the machine does falls on both.
Writes results/reference-overhead.json.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import DynamicCache

from random_models import random_composition
from tessellm_lab.common.claims import Claim, Result

SHAPES, PROMPT, ROUNDS = "llama-512", 128, 60
RESULTS = Path(__file__).resolve().parent.parent / "results"


def seconds(call: Callable[[], object]) -> float:
    """On a CPU what the one thread computed, so that other work on the machine does not count; on a GPU all of it."""
    clock = time.perf_counter if torch.cuda.is_available() else time.thread_time
    start = clock()
    call()
    return clock() - start


def overhead(composed: Callable[[], object], alone: Callable[[], object], rounds: int) -> dict[str, float]:
    """Median seconds of both, taken in turns, and the median of the ratios of neighbouring turns."""
    composed(), alone()
    pairs = [(seconds(composed), seconds(alone)) for _ in range(rounds)]
    ratios = sorted(both / members for both, members in pairs)
    return {
        "composed_ms": 1e3 * statistics.median(pair[0] for pair in pairs),
        "members_ms": 1e3 * statistics.median(pair[1] for pair in pairs),
        "ratio": statistics.median(ratios),
        "ratio_quartiles": [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]],
    }


@torch.inference_mode()
def measure(rule: str, batch: int, rounds: int) -> dict[str, dict[str, float]]:
    model = random_composition(SHAPES, 2, rule=rule)
    members = [model.member(name) for name in model.members]
    ids = torch.randint(3, model.config.vocab_size, (batch, PROMPT))
    token = ids[:, :1]
    cache, caches = model.new_cache(), [DynamicCache(config=member.config) for member in members]
    model(ids, past_key_values=cache, logits_to_keep=1)
    for member, own in zip(members, caches, strict=True):
        member(ids, past_key_values=own, logits_to_keep=1)

    def step_alone() -> None:
        for member, own in zip(members, caches, strict=True):
            member(token, past_key_values=own, logits_to_keep=1)

    def prefill_alone() -> None:
        for member in members:
            member(ids, use_cache=True, logits_to_keep=1)

    return {
        "step": overhead(lambda: model(token, past_key_values=cache, logits_to_keep=1), step_alone, rounds),
        "prefill": overhead(lambda: model(ids, use_cache=True, logits_to_keep=1), prefill_alone, rounds // 4),
    }


def main() -> None:
    torch.set_num_threads(1)  # a second thread only waits where other work shares the cores
    start = time.perf_counter()
    tables = {
        f"{rule}, batch {batch}": measure(rule, batch, ROUNDS) for rule in ("product", "mixture") for batch in (1, 8)
    }
    claims = [
        Claim(
            id=f"{kind}, {case}",
            statement=f"{case}: time of a composed {kind} over the sum of its members' own",
            value=round(row["ratio"], 4),
            target="≤ 1.10" if case.startswith("product") else None,
            holds=row["ratio"] <= 1.10 if case.startswith("product") else None,
        )
        for case, rows in tables.items()
        for kind, row in rows.items()
    ]
    result = Result("reference-overhead", claims, 0, "cpu", time.perf_counter() - start, tables=tables)
    result.write(RESULTS)
    for claim in claims:
        print(f"{claim.id:>28}: {claim.value:.3f} × the members' own   {claim.target or ''}")


if __name__ == "__main__":
    main()
