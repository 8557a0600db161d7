"""One real model on a CPU by our engine, llama.cpp and vLLM, in turns: SmolLM2-135M-Instruct's Q4_1 file, its Q4_0.

    prompts of 256 tokens, one sequence and eight: seconds to the first token, seconds a step after it
    one active LoRA expert over the base alone, by the engine
    memory of the loaded composition over its weights

Writes results/cpu-engines.json. Run: npm install node-llama-cpp; python benchmarks/cpu_engines.py [PYTHON_WITH_VLLM]
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gguf
import torch

import tessellm
from tessellm.bench.measure import engine_steps, random_prompts, sweep
from tessellm.demo.adapters import adapters_folder
from tessellm.engine.engine import Engine
from tessellm.engine.memory import return_memory
from tessellm.members import sources
from tessellm.model.variants import alone
from tessellm_lab.common.claims import Claim, Result, at_least, at_most

RESULTS = Path(__file__).resolve().parent.parent / "results"
PROMPT, NEW, ROUNDS, EXPERT = 256, 32, 3, "math"


def as_q4_0(file: Path, out: Path) -> Path:
    """Write a GGUF file with its Q4_1 tensors in Q4_0."""
    reader = gguf.GGUFReader(str(file))
    writer = gguf.GGUFWriter(str(out), "llama")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            part = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], part)
    for tensor in reader.tensors:
        kind, data = tensor.tensor_type, tensor.data
        if kind == gguf.GGMLQuantizationType.Q4_1:
            kind = gguf.GGMLQuantizationType.Q4_0
            data = gguf.quants.quantize(gguf.quants.dequantize(data, tensor.tensor_type), kind)
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def resident() -> int:
    gc.collect()
    return_memory()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def bytes_of(model: Any) -> int:
    """Return the bytes of all distinct weights and packs."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())


def later_tokens(model: Any) -> dict[str, float]:
    """Return seconds a step of the base and of one expert, each alone, and their ratio: in turns."""
    engines = [Engine(alone(model, name), 1, PROMPT + NEW) for name in ("base", EXPERT)]
    rows = random_prompts(model, [PROMPT])
    pairs = [[engine_steps(engine, rows, NEW).step for engine in engines] for _ in range(ROUNDS + 1)][1:]
    base, expert = (statistics.median(column) for column in zip(*pairs, strict=True))
    return {"base": base, "expert": expert, "ratio": statistics.median(two / one for one, two in pairs)}


def main() -> None:
    torch.set_num_threads(2)
    start, before = time.perf_counter(), resident()
    adapter = adapters_folder(None) / EXPERT
    model: Any = tessellm.compose("smollm2", {EXPERT: adapter}, rule="product")
    engine = Engine(model, 1, PROMPT + NEW)
    engine_steps(engine, random_prompts(model, [8]), 2)
    memory = {"grown": resident() - before, "weights": bytes_of(model)}
    print(f"memory {memory}", flush=True)
    expert = later_tokens(model)
    print(f"one expert over the base: {expert['ratio']:.2f}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        own = sources.find("smollm2", "the base").path
        files = {"Q4_1": own, "Q4_0": as_q4_0(own, Path(scratch) / "SmolLM2-135M-Instruct.Q4_0.gguf")}
        against = [f"llama.cpp={file}" for file in files.values()] + [f"vllm={given}" for given in sys.argv[1:2]]
        found = sweep(alone(model, "base"), (1, 8), (PROMPT,), NEW, ROUNDS, None, print, against)
    one, eight = found["rows"]
    names = {kind: f"llama.cpp {file.name}" for kind, file in files.items()}
    said = "over llama.cpp on"
    claims = [
        at_least("decode-q4_1", f"tokens/s, one sequence, {said} the same file", one[f"times_{names['Q4_1']}"], 0.8),
        at_least("decode-q4_0", f"the same {said} its Q4_0", one[f"times_{names['Q4_0']}"], 0.45),
        at_least("prefill-q4_1", f"first token after 256 {said} the same file", one[f"first_times_{names['Q4_1']}"], 3),
        at_least("prefill-q4_0", f"the same {said} its Q4_0", one[f"first_times_{names['Q4_0']}"], 0.9),
        at_least("eight-q4_1", f"eight sequences {said} the same file", eight[f"times_{names['Q4_1']}"], 1.2),
        at_most("one-expert", "later tokens with one active LoRA expert over the base alone", expert["ratio"], 1.25),
        at_most("memory", "memory of the composition over its weights", memory["grown"] / memory["weights"], 1.15),
    ]
    if sys.argv[1:]:
        claims += [
            Claim(f"vllm-{row['batch']}", f"batch {row['batch']}: tokens/s over vLLM's", row["times_vllm"])
            for row in found["rows"]
        ]
    tables = {**found, "one expert": expert, "memory": memory}
    Result("cpu-engines", claims, 0, "cpu", time.perf_counter() - start, tables=tables).write(RESULTS)
    for claim in claims:
        print(claim.statement, f"{claim.value:.3f}", claim.target or "", claim.holds)


if __name__ == "__main__":
    main()
