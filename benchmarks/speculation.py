"""What speculation brings on trained members: the same engine with and without it, in turns, on the same prompts.

The demo's letter models, with longer strings: a base that copies its prompt and experts that each replace a letter. On
a GPU they are wide, so that a step reads weights for most of its time, as a step of real models does, and in bfloat16;
strings are long, since reading a prompt takes as long as many steps; and of one length, which is learnt quickly.
Greedy texts must be the same at every batch size; where they part, it is told how near to a tie that was. Sampled ones
must have one distribution (a chi-square test on short texts with other seeds), and in float32 be the same for the same
seeds: in bfloat16 a pass over several tokens rounds differently from one over a single token. On a CPU with one thread:

    python benchmarks/speculation.py [--device cuda] [--rounds 3] [--members FOLDER]

Writes results/speculation.json (results/speculation-cuda.json on a GPU).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

import tessellm
from draft_distribution import Draws, compared, draft_always, warm_draws
from reference_overhead import RESULTS
from tessellm.engine.engine import Engine
from tessellm.engine.requests import Request
from tessellm.engine.sampling import Sampling, TokenChoice
from tessellm.engine.speculation import Speculation
from tessellm_lab.common.claims import Claim, Result, at_least
from tessellm_lab.letters_demo.letters import (
    END_OF_PROMPT,
    EOS,
    LetterSettings,
    accuracy,
    build_tokenizer,
    fine_tune,
    sample_strings,
    train_base,
)
from watched import Watched

SETTINGS = LetterSettings(max_length=24, base_steps=4000)
LARGE = LetterSettings(  # for a GPU
    124, 3072, 4, 24, batch=16, base_steps=300, base_rate=1.2e-4, expert_steps=100, expert_rate=4e-5, min_length=124
)
REPLACED = {"A": "K", "M": "B", "T": "X"}  # by one expert each
BATCHES = {1: 6, 4: 24, 16: 96}  # and how many strings go through the engine
LARGE_BATCHES = {1: 4, 4: 16, 16: 64}  # of those for a GPU
DRAFTS = ("lookup",)
RULES = ("mixture", "product")
GAIN = 1.6
DRAWS = {1: 400, 4: 1200, 16: 2400}  # short sampled texts at each batch
WRITTEN = 8  # tokens of the answer that they go on from
CELLS = 512  # of their slots
LEAST_P = 1e-3


def settings_for(device: str, steps: int | None = None) -> LetterSettings:
    """Members that keep the device busy; `steps` of training other than usual."""
    chosen = SETTINGS if device == "cpu" else LARGE
    return chosen if steps is None else replace(chosen, base_steps=steps, expert_steps=steps)


def composition(
    rule: str, seed: int, settings: LetterSettings, folder: Path | None, device: str
) -> tuple[Any, list[list[int]]]:
    """The trained members, composed, and prompts for them."""
    base, experts = trained(seed, settings, folder, device)
    return tessellm.compose(base, experts, rule=rule).to(device), encoded(strings(seed, settings))


def strings(seed: int, settings: LetterSettings) -> list[str]:
    """Long ones among those that members were trained on."""
    longest = settings.max_length
    shortest = max(2 * longest // 3, settings.min_length)
    return sample_strings(max(BATCHES.values()), seed + 1, min_length=shortest, max_length=longest)


def room(prompts: Sequence[Sequence[int]]) -> int:
    """Tokens that the longest answer takes: a letter for each of its prompt's, and the end."""
    return max(map(len, prompts)) - 1


def encoded(texts: Sequence[str]) -> list[list[int]]:
    tokenizer = build_tokenizer()
    return [tokenizer(text + END_OF_PROMPT).input_ids for text in texts]


def trained(seed: int, settings: LetterSettings, folder: Path | None, device: str) -> tuple[Any, dict[str, Any]]:
    """The base and its experts: from the folder if they are there, else trained on the device, and kept there."""
    if folder is not None and (folder / "base").is_dir():
        loaded = {name: LlamaForCausalLM.from_pretrained(folder / name, dtype="auto") for name in ("base", *REPLACED)}
        return loaded.pop("base"), loaded
    base, experts = train(seed, settings, device)
    if device != "cpu":
        base, experts = base.to(torch.bfloat16), {name: each.to(torch.bfloat16) for name, each in experts.items()}
    if folder is not None:
        for name, member in {**experts, "base": base}.items():  # the base last: then all are there
            member.save_pretrained(folder / name)
    return base, experts


def train(seed: int, settings: LetterSettings, device: str) -> tuple[Any, dict[str, Any]]:
    def report(done: int, loss: float) -> None:
        if done % 500 == 0:
            print(f"  base, {done} steps: loss {loss:.3f}", flush=True)

    torch.set_float32_matmul_precision("high")  # tensor cores: the members learn as well by them
    base = train_base(seed, settings, report, device)
    experts = {
        letter: fine_tune(base, {letter: other}, seed + number, settings)
        for number, (letter, other) in enumerate(REPLACED.items(), 1)
    }
    torch.set_float32_matmul_precision("highest")
    return base, experts


def right_strings(requests: Sequence[Request], texts: Sequence[str]) -> float:
    """The share of strings that were copied with every letter replaced that an expert replaces."""
    tokenizer = build_tokenizer()
    return accuracy([tokenizer.decode(r.tokens).removesuffix(EOS) for r in requests], texts, REPLACED)


def parted(plain: Sequence[Request], drafted: Sequence[Request]) -> list[float]:
    """For each pair of texts that are not the same: how far apart their tokens' log-probabilities are where they part.
    0 is a tie."""
    found = []
    for one, other in zip(plain, drafted, strict=True):
        pairs = zip(one.tokens, other.tokens, one.logprobs, other.logprobs, strict=False)
        at = next(((first, second) for a, b, first, second in pairs if a != b), None)
        if one.tokens != other.tokens:
            found.append(abs(at[0] - at[1]) if at else float("inf"))
    return found


@lru_cache(maxsize=1)
def without_drafts(model: Any, prompt: tuple[int, ...]) -> Draws:
    return warm_draws(Engine(model, slots=16, context=CELLS), prompt, max(DRAWS.values()))


def distribution(model: Any, batch: int, draft: str, prompt: Sequence[int]) -> dict[str, float]:
    """Whether sampled texts with drafts, always of three tokens, have the distribution of those without."""
    without = without_drafts(model, tuple(prompt))
    engine = Engine(model, slots=batch, context=CELLS, speculation=Speculation(draft))
    return compared(draft_always(engine, 3), without, DRAWS[batch])


def compare(
    model: Any, batch: int, draft: str, prompts: list[list[int]], rounds: int, draws: bool = True
) -> dict[str, Any]:
    """Tokens a second without and with speculation, in turns, and whether the texts are the same; `draws`: and whether
    short sampled ones have one distribution."""
    plain = Watched(Engine(model, slots=batch))
    drafting = Watched(Engine(model, slots=batch, speculation=Speculation(draft)))
    both, speculator = (plain, drafting), drafting.engine.speculator
    assert speculator is not None
    greedy = [Sampling(max_new_tokens=room(prompts))] * len(prompts)
    warm = [Sampling(room(prompts), 1.0, seed=seed) for seed in range(len(prompts))]
    sampled = parted(*(each.run(prompts, warm) for each in both))
    expected = plain.run(prompts, greedy)
    apart = parted(expected, drafting.run(prompts, greedy))
    speculator.prepare(max(map(len, prompts)), room(prompts), TokenChoice.GREEDY)
    for each in both:
        each.engine.executor.ready_prompts(sorted({*map(len, prompts)}), TokenChoice.GREEDY)
        each.run(prompts, greedy)
        each.forget()
    earlier = speculator.passes, speculator.drafted, speculator.accepted
    before = _prepared(both)
    for _ in range(rounds):
        for each in both:
            apart += parted(expected, each.run(prompts, greedy))
    told = speculator.passes, speculator.drafted, speculator.accepted
    passes, drafted, accepted = (now - before for now, before in zip(told, earlier, strict=True))
    pairs = list(zip(plain.seconds, drafting.seconds, strict=True))
    decoded = [[each.decoding(prompts, greedy[0]) for each in both] for _ in range(rounds)]
    written = sum(len(request.tokens) for request in expected)
    after = _prepared(both)
    begun = [*prompts[0], *expected[0].tokens[:WRITTEN]]
    return {
        "plain_tokens_a_second": written / statistics.median(plain.seconds),
        "drafting_tokens_a_second": written / statistics.median(drafting.seconds),
        "ratio": statistics.median(one / other for one, other in pairs),
        "ratios": [one / other for one, other in pairs],
        "decoding_ratio": statistics.median(drafted / without for without, drafted in decoded),
        "decoding_plain_tokens_a_second": statistics.median(without for without, _ in decoded),
        "decoding_drafting_tokens_a_second": statistics.median(drafted for _, drafted in decoded),
        "plain": plain.told(),
        "drafting": drafting.told(),
        "graph_ms": {" ".join(map(str, key)): 1e3 * seconds for key, seconds in drafting.graph_seconds.items()},
        "accepted": accepted / max(drafted, 1),
        "passes_a_run": passes / rounds,
        "prepared_while_timed": {name: after[name] - before[name] for name in after},
        "texts": len(prompts) * (rounds + 1),
        "apart_greedy": apart,
        "apart_sampled": len(sampled),
        "identical_greedy": not apart,
        "identical_sampled": not sampled,
        "dtype": str(model.dtype).removeprefix("torch."),
        **({"sampled": distribution(model, batch, draft, begun)} if draws else {}),
    }


def in_words(draft: str, batch: int, row: dict[str, Any]) -> str:
    return (
        f"{draft}, batch {batch}: {row['plain_tokens_a_second']:.0f} → {row['drafting_tokens_a_second']:.0f} tokens/s, "
        f"{row['ratio']:.2f} ×; decoding alone {row['decoding_ratio']:.2f} ×; sampled alike: "
        f"{row.get('sampled')}; {row['drafting']}; without {row['plain']}"
    )


def _prepared(both: Sequence[Watched]) -> dict[str, float]:
    """How many graphs were captured and functions compiled so far, and the seconds for it."""
    return {
        "graphs": sum(len(each.graph_seconds) for each in both),
        "compiled": torch._dynamo.utils.counters["stats"]["unique_graphs"],
        "seconds": sum(each.engine.executor.prepared_seconds for each in both),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rule", action="append", choices=RULES, help="both without it")
    parser.add_argument("--members", type=Path, help="keep the trained members here, for another run")
    given = parser.parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()
    settings = settings_for(given.device)
    base, experts = trained(given.seed, settings, given.members, given.device)
    texts = strings(given.seed, settings)
    prompts = encoded(texts)
    tables: dict[str, Any] = {}
    batches = BATCHES if given.device == "cpu" else LARGE_BATCHES
    for rule in given.rule or RULES:
        model = tessellm.compose(base, experts, rule=rule).to(given.device)
        right = right_strings(Engine(model, slots=16).generate(prompts, Sampling(room(prompts))), texts)
        print(f"{rule}: {right:.0%} of the strings are right", flush=True)
        tables[f"{rule}, right strings"] = right
        for draft in DRAFTS:
            for batch, count in batches.items():
                row = compare(model, batch, draft, prompts[:count], given.rounds)
                tables[f"{rule}, {draft}, batch {batch}"] = row
                print(f"{rule}, {in_words(draft, batch, row)}", flush=True)
    name = "speculation" if given.device == "cpu" else f"speculation-{given.device}"
    result = Result(name, claims(tables), given.seed, given.device, time.perf_counter() - start, tables=tables)
    result.write(RESULTS)
    for claim in result.claims:
        print(f"{claim.id:>40}: {claim.value}   {claim.target or ''}")


def same_texts(rows: Sequence[dict[str, Any]]) -> dict[str, bool]:
    """Whether texts with and without drafts are the same: greedy ones, and sampled ones where the same seeds must write
    them."""
    exact = [row for row in rows if row["dtype"] == "float32"]
    held = {"greedy": rows, "sampled": exact}
    return {kind: all(row[f"identical_{kind}"] for row in some) for kind, some in held.items() if some}


def alike(name: str, batch: int, rows: Sequence[dict[str, Any]]) -> Claim:
    """What the tests of sampled texts say at a batch size."""
    statement = f"batch {batch}: the least p-value that sampled texts with and without drafts have one distribution"
    return at_least(name, statement, min(row["sampled"]["p_value"] for row in rows), LEAST_P)


def claims(tables: dict[str, Any]) -> list[Claim]:
    cases = {case: row for case, row in tables.items() if isinstance(row, dict)}
    found = [
        Claim(f"same {kind} tokens", f"{kind} texts with and without drafts are the same", same, "in every case", same)
        for kind, same in same_texts(list(cases.values())).items()
    ]
    for batch in BATCHES:
        rows = [row for case, row in cases.items() if case.endswith(f"batch {batch}")]
        found.append(alike(f"sampled alike, batch {batch}", batch, rows))
    for rule in (each for each in RULES if f"{each}, right strings" in tables):
        for batch in BATCHES:
            ratio = {draft: cases[f"{rule}, {draft}, batch {batch}"]["ratio"] for draft in DRAFTS}
            draft = max(ratio, key=lambda each: ratio[each])
            statement = f"tokens a second over the same engine without drafts, by {draft}"
            value = round(ratio[draft], 2)
            found.append(Claim(f"{rule}, batch {batch}", statement, value, f"≥ {GAIN}", ratio[draft] >= GAIN))
    return found


if __name__ == "__main__":
    main()
