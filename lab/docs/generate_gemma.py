"""The estimates of the page on Gemma 2 2B, by the planner: `python lab/docs/generate_gemma.py`; `--check` compares."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from tessellm.evaluate.tasks import NEW_TOKENS
from tessellm.inspect.planning import DEVICES, GIB, USABLE, Device, MemberSize, Needs, speed_limit
from tessellm_lab.merging.merges import METHODS
from tessellm_lab.merging.splits import SHARE
from tessellm_lab.merging.table import DEVELOP

PAGE = Path(__file__).resolve().parent / "gemma-2-2b.md"
COLUMNS = ("base", "coding", "math", "composed")
PAPER = {  # arXiv 2605.28304, Table 1, and how many problems the test has
    "GSM8K": (1319, 3.2, 3.2, 50.2, 41.2),
    "MATH": (5000, 16.3, 16.7, 25.5, 24.2),
    "HumanEval+": (164, 3.7, 24.4, 13.4, 30.5),
    "MBPP+": (378, 33.9, 38.1, 32.8, 39.4),
}
CONTEXT = 2048  # tokens of the longest problem with its answer, rounded up
HARDWARE = ("rtx-4090", "l40s", "a100-80", "h100", "h200")
BATCH = 32
SET_ASIDE = ("HumanEval+", "MBPP+")  # without a training split


def with_block(text: str, name: str, lines: Iterator[str]) -> str:
    block = "\n".join([f"<!-- {name} -->", *lines, f"<!-- end {name} -->"])
    return re.sub(f"<!-- {name} -->.*?<!-- end {name} -->", lambda _: block, text, flags=re.DOTALL)


def member(name: str) -> MemberSize:
    config = Gemma2Config()  # the library's default is Gemma 2 2B's shape
    with torch.device("meta"):
        parameters = Gemma2ForCausalLM(config).num_parameters()
    values = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    heads = (config.num_attention_heads, config.num_key_value_heads)
    limits = (config.vocab_size, config.max_position_embeddings)
    return MemberSize(name, "full", parameters, 2 * parameters, values, config.hidden_size, *heads, *limits)


def needs(*names: str) -> Needs:
    return Needs(tuple(map(member, names)), "mixture" if len(names) > 1 else "alone", 2, len(names) > 1)


def paper() -> Iterator[str]:
    """Its numbers, with what so few problems leave open."""
    yield "| task | problems | " + " | ".join(COLUMNS) + " |"
    yield "|---" * (2 + len(COLUMNS)) + "|"
    for task, (problems, *scores) in PAPER.items():
        halves = [196 * math.sqrt(score / 100 * (1 - score / 100) / problems) for score in scores]
        cells = [f"{score} (± {half:.1f})" for score, half in zip(scores, halves, strict=True)]
        yield f"| {task} | {problems:,} | " + " | ".join(cells) + " |"


def developed(task: str) -> int:
    return min(DEVELOP, PAPER[task][0] // SHARE) if task in SET_ASIDE else DEVELOP


def minutes(which: Needs, device: Device, batch: int, problems: int) -> float:
    """At least: every text as long as allowed, memory read at full speed and nothing else."""
    return problems * NEW_TOKENS / speed_limit(which, device, CONTEXT, 1, batch) / 60


def held(which: Needs, batch: int) -> float:
    """Weights, caches and rows of log-probabilities."""
    return (which.weight_bytes + batch * (which.kv_bytes * CONTEXT + which.request_bytes)) / GIB


def machines() -> Iterator[str]:
    """What the commands of this page take: the paper's four columns and the default rule; the same and all merges."""
    alone, composed = needs("base"), needs("base", "math", "coding")
    every, aside = sum(row[0] for row in PAPER.values()), sum(map(developed, SET_ASIDE))
    tried = sum(len(method.strengths) for method in METHODS.values()) * sum(map(developed, PAPER))
    yield "| GPU | batch | GiB | with merges | a model, min | composition, min | 5 columns, h | with merges, h |"
    yield "|---" * 8 + "|"
    for name in HARDWARE:
        device = DEVICES[name]
        room = device.gib * USABLE
        batch = next(size for size in (BATCH, 16, 8, 4, 2, 1) if held(composed, size) <= room)
        memory = held(composed, batch)
        beside = composed.weight_bytes / GIB + held(alone, batch)  # the members stay while a merge is asked
        plain, three = (minutes(which, device, batch, every) for which in (alone, composed))
        first = 3 * plain + 2 * three
        more = first * (every - aside) / every + minutes(alone, device, batch, 5 * (every - aside) + tried)
        cells = (f"{max(memory, beside):.0f}" if beside <= room else "too large", f"{plain:.0f}", f"{three:.0f}")
        yield f"| {name} | {batch} | {memory:.0f} | " + " | ".join(cells) + f" | {first / 60:.1f} | {more / 60:.1f} |"


def main() -> int:
    text = PAGE.read_text(encoding="utf-8")
    wanted = with_block(with_block(text, "paper", paper()), "machines", machines())
    if "--check" in sys.argv:
        if text != wanted:
            print(f"out of date: {PAGE}: run python lab/docs/generate_gemma.py")
        return int(text != wanted)
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
