"""What the default rule `belief` costs on a CPU: SmolLM2 with five LoRA experts, float32, one thread, the engine.

    a step           under `belief` over one under Eq. 2 (`product`), both by all members
    reading a prompt under `belief` over what its members take: (a) to say what follows, as anyone who writes by them
                     does: logits of the last row alone; (b) with logits of as many rows as the rule looks at

Both sides take turns in the processor's own time, so that whatever else the machine does falls on both, and the median
of the ratios of neighbouring turns counts. Memory is kept as commands keep it. Writes results/belief-cost.json.
Run: python benchmarks/belief_cost.py [ROUNDS]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tessellm.bench.measure import random_prompts
from tessellm.commands.large_blocks import keep_large_blocks
from tessellm.decoding.buffers import TokenBatch
from tessellm.decoding.engine import Engine
from tessellm.decoding.members.groups import member_logits
from tessellm.decoding.prompt_schedule import CHUNK
from tessellm.decoding.sampling import Sampling
from tessellm.decoding.speculation.who import NOBODY
from tessellm.decoding.steps import Steps
from tessellm.experiments.lab.claims import Claim, Result, at_most
from tessellm.experiments.real.members import Experts, Places, load_base
from tessellm.experiments.real.skills import DOMAINS
from tessellm.model import ComposedForCausalLM
from tessellm.model.variants import with_rule

RESULTS = Path(__file__).resolve().parent.parent / "results"
PROMPTS, WRITTEN_AFTER = (64, 256, 1024), 64  # tokens
STEP, PROMPT = 1.05, 1.15  # what was to be reached


def seconds(call: Callable[[], object]) -> float:
    """What the one thread computed: other work on the machine does not count, but for the caches that it takes."""
    start = time.thread_time()
    call()
    return time.thread_time() - start


def in_turns(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each call, round by round; the order is turned around every time."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        for name in list(calls)[:: 1 if number % 2 else -1]:
            found[name].append(seconds(calls[name]))
    return found


def compared(found: dict[str, list[float]], of: str, over: str) -> dict[str, float]:
    ratios = [one / other for one, other in zip(found[of], found[over], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {"ratio": middle, "lower quartile": low, "upper quartile": high}


def milliseconds(found: dict[str, list[float]]) -> dict[str, float]:
    return {name: 1e3 * statistics.median(times) for name, times in found.items()}


def chat_prompt(engine: Engine, length: int) -> list[int]:
    """A prompt of so many tokens in the chat template, of random words."""
    rule: Any = engine.model.rule.rule
    (words,) = random_prompts(engine.model, [length - len(rule.opening) - len(rule.turn)])
    return [*rule.opening, *words, *rule.turn]


def steps(engines: dict[str, Engine], rounds: int) -> dict[str, Any]:
    """One text under each rule, a token of each at a time."""
    row = chat_prompt(engines["belief"], WRITTEN_AFTER)
    for engine in engines.values():
        engine.submit(row, Sampling(rounds + 8, ignore_end=True))
        for _ in range(4):
            engine.step()
    found = in_turns({name: engine.step for name, engine in engines.items()}, rounds)
    for engine in engines.values():
        while engine.busy:
            engine.step()
    return {"milliseconds": milliseconds(found), "belief over product": compared(found, "belief", "product")}


@torch.inference_mode()
def read_by_members(engine: Engine, row: list[int], keep: int) -> None:
    """All members over a prompt, chunk by chunk as the engine feeds it, and logits of its last rows."""
    for start in range(0, len(row), CHUNK):
        tokens = torch.tensor([row[start : start + CHUNK]])
        stop, last = start + tokens.shape[1], start + CHUNK >= len(row)
        rows = min(keep, tokens.shape[1]) if last else 1
        batch = TokenBatch(tokens, torch.arange(start, stop)[None], torch.tensor([0]), stop, rows, start=start)
        member_logits(engine.steps.work.groups, batch)


def rows_read(engine: Engine, row: list[int]) -> int:
    """How many rows' logits the engine computes for the rule."""
    last = row[-engine.window - 1 :]
    return len(last) - engine.model.rule.silent_rows(torch.tensor([last]))


def read_by_engine(engine: Engine, row: list[int]) -> None:
    engine.prefixes.forget()
    engine.generate([row], Sampling(1, ignore_end=True))


def prompts(engines: dict[str, Engine], length: int, rounds: int) -> dict[str, Any]:
    """One prompt, read anew each time."""
    engine = engines["belief"]
    row = chat_prompt(engine, length)
    found = in_turns(
        {
            "belief": lambda: read_by_engine(engine, row),
            "members": lambda: read_by_members(engine, row, 1),
            "members, all rows that the rule looks at": lambda: read_by_members(engine, row, rows_read(engine, row)),
            "product": lambda: read_by_engine(engines["product"], row),
        },
        rounds,
    )
    over = {f"belief over {name}": compared(found, "belief", name) for name in found if name != "belief"}
    return {"milliseconds": milliseconds(found), **over}


def composition() -> ComposedForCausalLM:
    places = Places.found()
    return Experts(load_base(places, "cpu"), {skill: places.adapters / skill for skill in DOMAINS}).composed


def claims_of(tables: dict[str, Any]) -> list[Claim]:
    over = tables["step"]["belief over product"]["ratio"]
    claims = [at_most("step", "a step under `belief` over one under Eq. 2", round(over, 3), STEP)]
    for length in PROMPTS:
        table = tables[f"prompt of {length}"]
        ratio = round(table["belief over members"]["ratio"], 3)
        text = f"reading a prompt of {length} tokens over its members' passes"
        claims.append(at_most(f"prompt-{length}", f"{text}, logits of the last row alone", ratio, PROMPT))
        ratio = round(table["belief over members, all rows that the rule looks at"]["ratio"], 3)
        claims.append(Claim(f"rows-{length}", f"{text}, logits of all rows that the rule looks at", ratio))
    return claims


def main() -> None:
    rounds, began = int(sys.argv[1]) if len(sys.argv) > 1 else 60, time.perf_counter()
    torch.set_num_threads(1)
    keep_large_blocks()
    model = composition()
    context = max(max(PROMPTS), WRITTEN_AFTER + rounds) + 16
    rules = ("belief", "product")
    engines = {rule: Engine(with_rule(model, rule), 1, context, speculation=NOBODY) for rule in rules}
    for engine in engines.values():  # the same members in the same memory: some places are faster than others
        work = replace(engine.steps.work, groups=engines["belief"].steps.work.groups)
        engine.steps = Steps(work, engine.context)
    tables: dict[str, Any] = {"step": steps(engines, rounds)}
    for length in PROMPTS:
        tables[f"prompt of {length}"] = prompts(engines, length, max(3, rounds * 8 // length))
        print(tables, flush=True)
    Result("belief-cost", claims_of(tables), 0, "cpu", time.perf_counter() - began, tables=tables).write(RESULTS)


if __name__ == "__main__":
    main()
