"""What speculation brings on trained members: the same engine with and without it, in turns, on the same prompts.

The demo's letter models, with longer strings: a base that copies its prompt and experts that each replace a letter. On
a GPU they are larger and the strings longer, since there a step of small ones takes no longer than asking for it, and
reading a prompt as long as many steps.
Greedy tokens must be identical at every batch size; sampled ones too, for the same seeds. On a CPU with one thread:

    python benchmarks/speculation.py [--device cuda] [--rounds 3] [--members FOLDER]

Writes results/speculation.json (results/speculation-cuda.json on a GPU).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

import tessellm
from reference_overhead import RESULTS
from tessellm.decoding.engine import Engine
from tessellm.decoding.requests import Request
from tessellm.decoding.sampling import Sampling
from tessellm.decoding.speculation import Speculation
from tessellm.experiments.claims import Claim, Result
from tessellm.experiments.demo.letters import (
    END_OF_PROMPT,
    EOS,
    LetterSettings,
    accuracy,
    build_tokenizer,
    fine_tune,
    sample_strings,
    train_base,
)

SETTINGS = LetterSettings(max_length=24, base_steps=4000)
LARGE = LetterSettings(48, 768, 4, 12, base_steps=2500, base_rate=6e-4, expert_rate=3e-4)  # for a GPU
REPLACED = {"A": "K", "M": "B", "T": "X"}  # by one expert each
BATCHES = {1: 6, 4: 24, 16: 96}  # and how many strings go through the engine
DRAFTS = ("lookup", "member:base")
RULES = ("evidence", "product")
GAIN = 1.6


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
    return sample_strings(max(BATCHES.values()), seed + 1, min_length=2 * longest // 3, max_length=longest)


def room(prompts: Sequence[Sequence[int]]) -> int:
    """Tokens that the longest answer takes: a letter for each of its prompt's, and the end."""
    return max(map(len, prompts)) - 1


def encoded(texts: Sequence[str]) -> list[list[int]]:
    tokenizer = build_tokenizer()
    return [tokenizer(text + END_OF_PROMPT).input_ids for text in texts]


def trained(seed: int, settings: LetterSettings, folder: Path | None, device: str) -> tuple[Any, dict[str, Any]]:
    """The base and its experts: from the folder if they are there, else trained on the device, and kept there."""
    if folder is not None and (folder / "base").is_dir():
        loaded = {name: LlamaForCausalLM.from_pretrained(folder / name) for name in ("base", *REPLACED)}
        return loaded.pop("base"), loaded
    base, experts = train(seed, settings, device)
    if folder is not None:
        for name, member in {**experts, "base": base}.items():  # the base last: then all are there
            member.save_pretrained(folder / name)
    return base, experts


def train(seed: int, settings: LetterSettings, device: str) -> tuple[Any, dict[str, Any]]:
    def report(done: int, loss: float) -> None:
        if done % 500 == 0:
            print(f"  base, {done} steps: loss {loss:.3f}", flush=True)

    base = train_base(seed, settings, report, device)
    return base, {
        letter: fine_tune(base, {letter: other}, seed + number, settings)
        for number, (letter, other) in enumerate(REPLACED.items(), 1)
    }


def tokens(requests: Sequence[Request]) -> list[list[int]]:
    return [request.tokens for request in requests]


def seconds(engine: Engine, prompts: list[list[int]], asked: Sampling, found: list[list[list[int]]]) -> float:
    """Of one run through the engine; on a CPU those of its one thread, whatever else the machine does."""
    clock = time.process_time if engine.state.device.type == "cpu" else time.perf_counter
    start = clock()
    found.append(tokens(engine.generate(prompts, asked)))
    return clock() - start


def compare(model: Any, batch: int, draft: str, prompts: list[list[int]], rounds: int) -> dict[str, Any]:
    """Tokens a second without and with speculation, in turns, and whether the texts are the same."""
    plain = Engine(model, slots=batch)
    drafting = Engine(model, slots=batch, speculation=Speculation(draft))
    greedy = Sampling(max_new_tokens=room(prompts))
    warm = [Sampling(room(prompts), 1.0, seed=seed) for seed in range(len(prompts))]
    texts, sampled = ([tokens(e.generate(prompts, how)) for e in (plain, drafting)] for how in (greedy, warm))
    speculator, found = drafting.speculator, []
    assert speculator is not None
    speculator.passes = speculator.drafted = speculator.accepted = 0
    pairs = [tuple(seconds(e, prompts, greedy, found) for e in (plain, drafting)) for _ in range(rounds)]
    written = sum(map(len, texts[0]))
    return {
        "plain_tokens_a_second": written / statistics.median(pair[0] for pair in pairs),
        "drafting_tokens_a_second": written / statistics.median(pair[1] for pair in pairs),
        "ratio": statistics.median(one / other for one, other in pairs),
        "ratios": [one / other for one, other in pairs],
        "accepted": speculator.accepted / max(speculator.drafted, 1),
        "passes_a_run": speculator.passes / rounds,
        "identical_greedy": all(each == texts[0] for each in (texts[1], *found)),
        "identical_sampled": sampled[0] == sampled[1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--members", type=Path, help="keep the trained members here, for another run")
    given = parser.parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()
    settings = settings_for(given.device)
    base, experts = trained(given.seed, settings, given.members, given.device)
    tokenizer, texts = build_tokenizer(), strings(given.seed, settings)
    prompts = encoded(texts)
    tables: dict[str, Any] = {}
    for rule in RULES:
        model = tessellm.compose(base, experts, rule=rule).to(given.device)
        answers = tokens(Engine(model, slots=16).generate(prompts, Sampling(room(prompts))))
        right = accuracy([tokenizer.decode(text).removesuffix(EOS) for text in answers], texts, REPLACED)
        print(f"{rule}: {right:.0%} of the strings are right", flush=True)
        tables[f"{rule}, right strings"] = right
        for draft in DRAFTS:
            for batch, count in BATCHES.items():
                row = compare(model, batch, draft, prompts[:count], given.rounds)
                tables[f"{rule}, {draft}, batch {batch}"] = row
                print(
                    f"{rule}, {draft}, batch {batch}: {row['plain_tokens_a_second']:.0f} → "
                    f"{row['drafting_tokens_a_second']:.0f} tokens/s, {row['ratio']:.2f} ×",
                    flush=True,
                )
    name = "speculation" if given.device == "cpu" else f"speculation-{given.device}"
    result = Result(name, claims(tables), given.seed, given.device, time.perf_counter() - start, tables=tables)
    result.write(RESULTS)
    for claim in result.claims:
        print(f"{claim.id:>40}: {claim.value}   {claim.target or ''}")


def claims(tables: dict[str, Any]) -> list[Claim]:
    cases = {case: row for case, row in tables.items() if isinstance(row, dict)}
    found = [
        Claim(
            f"same {kind} tokens",
            f"{kind} texts with and without drafts are the same",
            same,
            "in every case",
            same,
        )
        for kind in ("greedy", "sampled")
        for same in [all(row[f"identical_{kind}"] for row in cases.values())]
    ]
    for rule in RULES:
        for batch in BATCHES:
            ratio = {draft: cases[f"{rule}, {draft}, batch {batch}"]["ratio"] for draft in DRAFTS}
            draft = max(ratio, key=lambda each: ratio[each])
            statement = f"tokens a second over the same engine without drafts, by {draft}"
            value = round(ratio[draft], 2)
            found.append(Claim(f"{rule}, batch {batch}", statement, value, f"≥ {GAIN}", ratio[draft] >= GAIN))
    return found


if __name__ == "__main__":
    main()
