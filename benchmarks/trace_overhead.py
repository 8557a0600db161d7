"""What a trace costs while generating: a decoding step that is watched against one that is not, in turns.

The models of reference_overhead.py, on whatever device there is. Writes results/trace-overhead.json.
"""

from __future__ import annotations

import time

import torch

from random_models import random_composition
from reference_overhead import PROMPT, RESULTS, ROUNDS, SHAPES, overhead
from tessellm.diagnose.recorder import Recorder
from tessellm_lab.common.claims import Claim, Result

LIMIT = 1.10


@torch.inference_mode()
def measure(rule: str, batch: int, rounds: int, device: str) -> dict[str, float]:
    model = random_composition(SHAPES, 2, rule=rule, device=device)
    ids = torch.randint(3, model.config.vocab_size, (batch, PROMPT), device=device)
    plain, watched = model.new_cache(), model.new_cache()
    watched.observer = Recorder(model, last_only=True)
    for cache in (plain, watched):
        model(ids, past_key_values=cache, logits_to_keep=1)

    def step(cache) -> None:
        model(ids[:, :1], past_key_values=cache, logits_to_keep=1)
        if device == "cuda":
            torch.cuda.synchronize()

    found = overhead(lambda: step(watched), lambda: step(plain), rounds)
    return {"traced_ms": found["composed_ms"], "plain_ms": found["members_ms"]} | {
        key: found[key] for key in ("ratio", "ratio_quartiles")
    }


def main() -> None:
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    start = time.perf_counter()
    tables = {
        f"{rule}, batch {batch}": measure(rule, batch, ROUNDS, device)
        for rule in ("product", "mixture")
        for batch in (1, 8)
    }
    claims = [
        Claim(
            id=case,
            statement=f"{case}: time of a decoding step with its trace over one without",
            value=round(row["ratio"], 4),
            target=f"≤ {LIMIT:.2f}",
            holds=row["ratio"] <= LIMIT,
        )
        for case, row in tables.items()
    ]
    Result("trace-overhead", claims, 0, "cpu", time.perf_counter() - start, tables=tables).write(RESULTS)
    for claim in claims:
        print(f"{claim.id:>20}: {claim.value:.3f}   {claim.target}")


if __name__ == "__main__":
    main()
