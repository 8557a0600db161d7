"""The parts of benchmarks/resting.py for a GPU: random weights in the shapes of Gemma 2 2B.

    alone         one model at one row, which all is compared with
    three         three full members at batch 1 and 32: who is believed as in real answers (resting_traces.json)
    adversarial   the same members by a rule that is sure of another member at every token and never says what it would
    lora          a base and six LoRA experts at one row, against the base alone
    nine          nine full members at one row

Members repeat the last token, very surely, whatever they are: so a draft is right where the recorded one was, also
where a pass over several tokens rounds otherwise. Every part is written as soon as it is there.
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from resting_rules import Contrary, Replayed
from resting_traces import read_traces
from tessellm.bench.measure import random_prompts, synchronise
from tessellm.bench.models import base_alone, random_composition, with_deltas
from tessellm.compose import compose
from tessellm.decoding.engine import Engine
from tessellm.decoding.sampling import Sampling
from tessellm.decoding.speculation import Speculation
from tessellm.experiments.lab.claims import Claim, at_least, at_most
from tessellm.model import ComposedForCausalLM

ON_GPU = ("alone", "three", "adversarial", "lora", "nine")
AWAKE, RESTING = Speculation("none"), Speculation("belief")
PROMPT, ROUNDS = 128, 3
WHOLE = 60  # a token that every number of kinds divides, and none that means something
TARGETS = {3: 2.2, 9: 2.6}  # milliseconds a token at batch 1, by members
GAIN_AT_32, OVER_BASE, SLOWER = 1.6, 1.05, 1.15
AWAKE_AT_32 = 5.80  # milliseconds a token of all awake when resting was begun, at commit 2334b97 (docs/log.md)
QUIET = -0.99  # of norms behind blocks: what a block adds is small
Found = tuple[list[Claim], dict[str, Any]]


def random_base(shape: str, device: str, dtype: torch.dtype) -> PreTrainedModel:
    """A model that says its last token again: what its layers add is small beside the token's embedding."""
    base: Any = random_composition(shape, 1, "full", "product", device, dtype).base
    with torch.no_grad():
        for name, weight in base.named_parameters():
            if "post_feedforward" in name or ("post_attention" in name and base.config.model_type == "gemma2"):
                weight.fill_(QUIET)
    return base


def full_members(base: PreTrainedModel, members: int) -> ComposedForCausalLM:
    """Copies of the base, in memory of their own."""
    return compose(base, {f"expert{n}": copy.deepcopy(base) for n in range(1, members)}, rule="belief")


def replaying(model: ComposedForCausalLM) -> ComposedForCausalLM:
    model.set_rule(Replayed(read_traces(), len(model.members), PROMPT, model.device))
    return model


def prompts(model: ComposedForCausalLM, kinds: Sequence[int]) -> list[list[int]]:
    """Random tokens; the last one names the kind of answer that is replayed, by what is left of it."""
    rows = random_prompts(model, [PROMPT] * len(kinds))
    return [[*row[:-1], WHOLE + kind] for row, kind in zip(rows, kinds, strict=True)]


def run(engine: Engine, rows: Sequence[Sequence[int]], new: int) -> tuple[float, list[list[int]]]:
    """Seconds a token of all rows together, after their first ones; the texts."""
    engine.prefixes.forget()
    requests = [engine.submit(row, Sampling(new, ignore_end=True)) for row in rows]
    while not all(request.tokens for request in requests):
        engine.step()
    synchronise(engine.model.device)
    before, start = sum(len(request.tokens) for request in requests), time.perf_counter()
    while engine.busy:
        engine.step()
    synchronise(engine.model.device)
    steps = (sum(len(request.tokens) for request in requests) - before) / len(rows)
    return (time.perf_counter() - start) / steps, [request.tokens for request in requests]


def measure(
    model: ComposedForCausalLM, texts: Sequence[Sequence[Sequence[int]]], new: int, who: Speculation
) -> dict[str, Any]:
    """Milliseconds a token, averaged over batches of texts; the device's milliseconds of each pass; drafts."""
    began = time.perf_counter()
    engine = Engine(model, len(texts[0]), PROMPT + new + 16, speculation=who)
    run(engine, texts[0], new)
    if speculator := engine.speculator:
        speculator.passes = speculator.drafted = speculator.accepted = 0
    ready, times, written = time.perf_counter() - began, [], []
    for _ in range(ROUNDS):
        found = [run(engine, rows, new) for rows in texts]
        times.append(statistics.mean(seconds for seconds, _ in found))
        written = [text for _, batch in found for text in batch]
    graphs: dict[Any, Any] = getattr(engine.steps, "graphs", {})
    passes = {key: min(engine.steps.recorder.seconds(each) for _ in range(3)) for key, each in graphs.items()}
    result = {
        "ms": 1e3 * statistics.median(times),
        "texts": written,
        "passes_ms": {" ".join(map(str, key[:3])): round(1e3 * s, 3) for key, s in passes.items() if key[0] != "feed"},
        "ready_seconds": ready,
    }
    if speculator:
        result |= {"passes": speculator.passes, "drafted": speculator.drafted}
        result["accepted"] = speculator.accepted / max(1, speculator.drafted)
    del engine
    gc.collect()
    return result


def compared(name: str, model: ComposedForCausalLM, texts: Sequence[Any], new: int) -> dict[str, Any]:
    """Both engines, one after another, and how many texts are the same."""
    awake, resting = (measure(model, texts, new, who) for who in (AWAKE, RESTING))
    pairs = list(zip(awake.pop("texts"), resting.pop("texts"), strict=True))
    same = statistics.mean(one == other for one, other in pairs)
    print(
        f"{name:<34} {awake['ms']:7.3f} ms awake {resting['ms']:7.3f} resting  {awake['ms'] / resting['ms']:5.2f} ×  "
        f"accepted {resting['accepted']:.3f} of {resting['drafted']}  same {same:.2f}  "
        f"ready {awake['ready_seconds']:.0f} + {resting['ready_seconds']:.0f} s",
        flush=True,
    )
    by_length = by_passes(resting["passes_ms"])
    print("   ", {**awake["passes_ms"], **resting["passes_ms"]}, "a token by these:", by_length, flush=True)
    same_as = {"same": same, "ratio": awake["ms"] / resting["ms"], "by_length": by_length}
    return {"awake": awake, "resting": resting, **same_as}


def by_passes(passes_ms: dict[str, float]) -> dict[str, float]:
    """Milliseconds a token by the device's alone, if one member writes and all of it is right, by tokens of a draft."""
    found: dict[str, float] = {}
    for key, verifying in passes_ms.items():
        name, rows, length = key.split()[0], *key.split()[-2:]
        if name == "verify":
            drafting = max(ms for other, ms in passes_ms.items() if other.startswith("draft") and other.endswith(" 1"))
            found[f"{rows} × {length}"] = round((int(length) * drafting + verifying) / (int(length) + 1), 3)
    return found


def three(base: PreTrainedModel, new: int) -> Iterator[Found]:
    model = replaying(full_members(base, 3))
    kinds = range(len(model.rule.rule.kinds))  # type: ignore[attr-defined]
    name = "3 members, batch 1"
    found = compared(name, model, [prompts(model, [kind]) for kind in kinds], new)
    yield _at_one(name, found, TARGETS[3]), {name: found}
    for name, rows in (("3 members, batch 32, one kind", [0] * 32), ("3 members, batch 32, all kinds", [*kinds] * 6)):
        found = compared(name, model, [prompts(model, rows[:32])], new)
        what = f"{name}: tokens/s over those with all members awake"
        claims = [Claim(name, what, found["ratio"])]
        if len(set(rows)) == 1:
            before, gain = f"{what}, as these were when resting was begun", AWAKE_AT_32 / found["resting"]["ms"]
            claims = [
                at_least(name, what, found["ratio"], GAIN_AT_32),
                at_least(f"{name}, so far", before, gain, GAIN_AT_32),
            ]
        yield claims, {name: found}


def adversarial(base: PreTrainedModel, new: int) -> Iterator[Found]:
    model, name = full_members(base, 3), "3 members, adversarial"
    model.set_rule(Contrary(3))
    found = compared(name, model, [prompts(model, [kind]) for kind in range(3)], new)
    what = "3 members, a rule sure of another at every token and never right: time a token over that of all awake"
    yield [at_most(name, what, 1 / found["ratio"], SLOWER)], {name: found}


def lora(base: PreTrainedModel, new: int) -> Iterator[Found]:
    model = replaying(compose(base, {f"expert{n}": with_deltas(base) for n in range(1, 7)}, rule="belief"))
    name, kinds = "base and 6 LoRA experts, batch 1", range(len(model.rule.rule.kinds))  # type: ignore[attr-defined]
    texts = [prompts(model, [kind]) for kind in kinds]
    one = measure(base_alone(model), texts, new, AWAKE)["ms"]
    found = compared(name, model, texts, new) | {"base_ms": one}
    best = min(found["awake"]["ms"], found["resting"]["ms"])
    yield (
        [
            at_most(name, f"{name}: time a token, the better of both, over the base alone", best / one, OVER_BASE),
            Claim(f"{name}, awake", f"{name}: the same with all awake", found["awake"]["ms"] / one),
            Claim(f"{name}, resting", f"{name}: the same while members rest", found["resting"]["ms"] / one),
        ],
        {name: found},
    )


def nine(base: PreTrainedModel, new: int) -> Iterator[Found]:
    model, name = replaying(full_members(base, 9)), "9 members, batch 1"
    kinds = range(len(model.rule.rule.kinds))  # type: ignore[attr-defined]
    found = compared(name, model, [prompts(model, [kind]) for kind in kinds], new)
    yield _at_one(name, found, TARGETS[9]), {name: found}


def alone(base: PreTrainedModel, new: int) -> Iterator[Found]:
    model = base_alone(compose(base, {"same": copy.deepcopy(base)}))
    found = measure(model, [prompts(model, [0])], new, AWAKE)
    print(f"one model alone {found['ms']:.3f} ms, {found['passes_ms']}", flush=True)
    del found["texts"]
    yield [Claim("one alone", "one model alone, batch 1: milliseconds a token", found["ms"])], {"one alone": found}


def _at_one(name: str, found: dict[str, Any], target: float) -> list[Claim]:
    return [
        at_most(name, f"{name}: milliseconds a token while members rest", found["resting"]["ms"], target),
        Claim(f"{name}, awake", f"{name}: milliseconds a token, all awake", found["awake"]["ms"]),
        at_least(f"{name}, same", f"{name}: share of texts that are the same", found["same"], 0.99),
    ]


def on_gpu(asked: argparse.Namespace) -> Iterator[Found]:
    """Every part that is asked for; each says how long it took."""
    dtype = torch.bfloat16 if asked.device == "cuda" else torch.float32
    start = time.perf_counter()
    base = random_base(asked.shapes or "gemma-2-2b", asked.device, dtype)
    print(f"a base was made in {time.perf_counter() - start:.1f} s", flush=True)
    parts = {"alone": alone, "three": three, "adversarial": adversarial, "lora": lora, "nine": nine}
    for name in [name for name in ON_GPU if name in asked.parts]:
        start = time.perf_counter()
        yield from parts[name](base, asked.tokens)
        gc.collect()
        print(f"[{name}: {time.perf_counter() - start:.0f} s]", flush=True)
