"""Problems answered as `tessellm evaluate` does, against the notebook's loop: one problem after the other, every text
to its last token, log-probabilities to the CPU.

Both decode the same prompts by Eq. 2 in one run, the second with stop texts that it looks for. Random weights in known
shapes: speed does not depend on them. Tokens a second are compared, and the loop, being slow, is given a few problems.

Writes evaluation-speed.json. Run: python benchmarks/evaluation_speed.py [cpu|full] [FOLDER]; full is meant for a GPU.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from random_models import random_composition
from reference_overhead import RESULTS
from tessellm.bench.measure import random_prompts
from tessellm.evaluate.writer import Ask, BlockWriter
from tessellm.text.options import TextOptions
from tessellm_lab.common.claims import Claim, Result, at_least
from tessellm_lab.common.loops import Loop

STOPS = ("Question:", "\nclass ", "\nif __name__")  # none is in the words below


@dataclass(frozen=True)
class Size:
    """What is measured."""

    shape: str
    device: str
    dtype: str
    prompts: tuple[int, int]  # tokens, from and to
    new: int
    problems: int
    batch: int
    by_loop: int  # problems that the loop is given


SIZES = {
    "cpu": Size("llama-tiny", "cpu", "float32", (32, 128), 64, 32, 8, 4),
    "full": Size("gemma-2-2b", "cuda", "bfloat16", (200, 1200), 512, 96, 32, 2),
}


def composition(size: Size) -> Any:
    """Base and two experts, with a tokenizer that knows a word for every id."""
    model = random_composition(size.shape, 2, "full", "product", size.device, getattr(torch, size.dtype))
    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(model.config.vocab_size)}, unk_token="w0"))
    model.tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w1")
    return model


def by_writer(model: Any, rows: list[list[int]], size: Size) -> dict[str, float]:
    """As evaluate does; making the engine counts."""
    asks = [Ask(tuple(row), TextOptions(size.new, stop=STOPS)) for row in rows]
    start = time.perf_counter()
    tokens = sum(written.tokens for _, written in BlockWriter(model, size.batch).write(asks))
    return {"tokens": tokens, "seconds": time.perf_counter() - start}


def by_loop(model: Any, rows: list[list[int]], size: Size) -> dict[str, float]:
    start = time.perf_counter()
    for row in rows[: size.by_loop]:
        loop = Loop(model, [row], to_cpu=True)
        for _ in range(size.new):
            loop.step()
    return {"tokens": size.by_loop * size.new, "seconds": time.perf_counter() - start}


def main() -> int:
    name = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    out = Path(sys.argv[2]) if len(sys.argv) > 2 else RESULTS
    size, began = SIZES[name], time.perf_counter()
    model = composition(size)
    low, high = size.prompts
    lengths = torch.randint(low, high + 1, (size.problems,), generator=torch.Generator().manual_seed(0)).tolist()
    rows = random_prompts(model, lengths)
    by_loop(model, rows, Size(**{**asdict(size), "new": 4, "by_loop": 1}))  # the first pass prepares kernels
    found = {"evaluate": by_writer(model, rows, size), "notebook": by_loop(model, rows, size)}
    rates = {way: each["tokens"] / each["seconds"] for way, each in found.items()}
    ratio = rates["evaluate"] / rates["notebook"]
    statement = "tokens a second of evaluate over the notebook's loop, base and two experts, Eq. 2"
    claim = at_least("ratio", statement, ratio, 5) if name == "full" else Claim("ratio", statement, ratio)
    tables: dict[str, Any] = {"size": asdict(size), "measured": found, "tokens_a_second": rates}
    print(f"evaluate {rates['evaluate']:.1f}, notebook {rates['notebook']:.1f} tokens a second: {ratio:.1f} ×")
    result = Result("evaluation-speed", [claim], 0, name, time.perf_counter() - began, tables=tables)
    result.write(out)
    return int(not result.holds)


if __name__ == "__main__":
    sys.exit(main())
