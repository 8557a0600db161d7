"""The base alone, in one process: milliseconds of first and later tokens. Runs in any checkout that `compose` is in."""

from __future__ import annotations

import gc
import json
import statistics
from pathlib import Path

import tessellm
from tessellm.bench import measure
from tessellm.model.variants import alone

ADAPTER = Path(__file__).resolve().parent.parent / "adapters" / "smollm2" / "math"
PROMPTS, NEW, ROUNDS = (64, 256), 17, 7


def main() -> None:
    model = alone(tessellm.compose("smollm2", {"math": str(ADAPTER)}, rule="product", dtype="float32"), "base")
    engine = measure.Engine(model, 1, max(PROMPTS) + NEW)
    gc.collect()
    gc.freeze()
    found = {}
    for length in PROMPTS:
        times = [
            measure.engine_steps(engine, measure.random_prompts(model, [length], turn), NEW)
            for turn in range(ROUNDS + 1)
        ]
        first, step = zip(*times[1:], strict=True)
        found[f"first token of {length}, ms"] = 1e3 * statistics.median(first)
        found[f"later tokens of {length}, ms"] = 1e3 * statistics.median(step)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
