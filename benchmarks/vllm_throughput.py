"""Thirty-two requests at once: vLLM, our engine and transformers' generate on one composition, in turns.

Three Llamas of 6 layers, 384 wide, with a vocabulary of 16,000, in float32, one thread; vLLM's CPU build. Run it in
.venv-vllm (see `make test-vllm`). Writes results/vllm-throughput.json.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="2",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_LOGGING_LEVEL="ERROR",
    OMP_NUM_THREADS="1",
)

import torch
from transformers import LlamaForCausalLM

import tessellm
from random_models import SHAPES
from tessellm.engine.engine import Engine
from tessellm.engine.sampling import Sampling
from tessellm_lab.common.claims import Claim, Result

CONFIG = SHAPES["llama-384"]()
CONFIG.bos_token_id = CONFIG.eos_token_id = None
REQUESTS, NEW, ROUNDS = 32, 48, 3
RESULTS = Path(__file__).resolve().parent.parent / "results"


Prompts = list[list[int]]


def prompts(number: int) -> Prompts:
    """Of 16 to 128 tokens, others in every round: what an engine remembers of a prompt must not help it."""
    generator = torch.Generator().manual_seed(number)
    lengths = torch.randint(16, 129, (REQUESTS,), generator=generator).tolist()
    return [torch.randint(3, CONFIG.vocab_size, (length,), generator=generator).tolist() for length in lengths]


def with_vllm(folder: Path) -> Callable[[Prompts], int]:
    from vllm import LLM, SamplingParams

    compiled = os.environ.get("TORCHDYNAMO_DISABLE") != "1"
    llm = LLM(
        str(folder), dtype="float32", max_model_len=256, max_num_seqs=REQUESTS, enforce_eager=not compiled,
        enable_prefix_caching=False, skip_tokenizer_init=True,
    )  # fmt: skip
    sampling = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)

    def run(asked: Prompts) -> int:
        wanted: Any = [{"prompt_token_ids": row} for row in asked]
        return sum(len(each.outputs[0].token_ids) for each in llm.generate(wanted, sampling, use_tqdm=False))

    return run


def with_our_engine(model: Any) -> Callable[[Prompts], int]:
    engine = Engine(model, slots=REQUESTS, context=256)
    sampling = Sampling(max_new_tokens=NEW, ignore_end=True)
    return lambda asked: sum(len(request.tokens) for request in engine.generate(asked, sampling))


def with_transformers(model: Any) -> Callable[[Prompts], int]:
    def run(asked: Prompts) -> int:
        longest = max(map(len, asked))
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in asked])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in asked])
        written = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
        return written[:, longest:].numel()

    return run


def measure(rule: str, folder: Path) -> dict[str, float]:
    """Tokens a second of each, the median over rounds in which all take their turn."""
    torch.manual_seed(0)
    members = {name: folder / name for name in ("base", "one", "two")}
    for path in members.values():
        if not path.is_dir():
            LlamaForCausalLM(CONFIG).save_pretrained(path)
    model = tessellm.compose(str(members["base"]), {name: str(members[name]) for name in ("one", "two")}, rule=rule)
    model.save_pretrained(folder / rule)
    ways = {
        "vllm": with_vllm(folder / rule),
        "engine": with_our_engine(model),
        "transformers": with_transformers(model),
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(ROUNDS + 1):
        asked = prompts(number)
        for name, run in ways.items():
            start = time.perf_counter()
            tokens = run(asked)
            if number:  # the first round warms up
                rates[name].append(tokens / (time.perf_counter() - start))
    return {name: statistics.median(found) for name, found in rates.items()}


def main() -> None:
    torch.set_num_threads(1)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        tables = {rule: measure(rule, Path(folder)) for rule in ("product", "mixture")}
    claims = [
        Claim(
            id=f"{rule}, 32 requests",
            statement=f"{rule}: vLLM's tokens a second over our engine's, 32 requests at once, in turns",
            value=round(rates["vllm"] / rates["engine"], 3),
            target="≥ 1",
            holds=rates["vllm"] >= rates["engine"],
        )
        for rule, rates in tables.items()
    ]
    Result("vllm-throughput", claims, 0, "cpu", time.perf_counter() - start, tables=tables).write(RESULTS)
    for rule, rates in tables.items():
        print(rule, {name: round(rate, 1) for name, rate in rates.items()})


if __name__ == "__main__":
    main()
