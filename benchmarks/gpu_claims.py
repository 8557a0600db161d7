"""What the items of gpu_decoding.py say about what was to be shown. Items that are not there are claimed nothing of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from speculation import GAIN, alike, same_texts
from tessellm_lab.common.claims import Claim, at_least, at_most

Tables = Mapping[str, Any]
KINDS = {
    "greedy": ("greedy", "greedy texts"),
    "sampled": ("seeds", "sampled texts, in float32 and with the same seeds,"),
}


def claims(tables: Tables) -> list[Claim]:
    found = []
    for make in (full, lora, equality, speculation):
        for each in make(tables):
            try:
                found.append(each())
            except KeyError:
                continue
    return found


def _ms(tables: Tables, item: str) -> float:
    return float(tables[item]["ms_a_step"])


def full(tables: Tables) -> list[Callable[[], Claim]]:
    loops = "three full models, batch 1, prompt 128: the notebook loop's time of a step over the engine's"
    milliseconds = "three full models, batch 1, prompt 128: milliseconds a token"
    batches = "three full models: tokens a second at batch 32 over those at batch 1"
    return [
        lambda: at_least("full-notebook", loops, tables["full, batch 1"]["times_notebook"], 20),
        lambda: at_most("full-ms", milliseconds, _ms(tables, "full, batch 1"), 4.6),
        lambda: at_least("full-batch", batches, 32 * _ms(tables, "full, batch 1") / _ms(tables, "full, batch 32"), 20),
    ]


def lora(tables: Tables) -> list[Callable[[], Claim]]:
    def over_base() -> Claim:
        statement = "base and 3 LoRA experts, batch 1: a step over one of the base alone at four rows"
        return at_most("lora-base", statement, _ms(tables, "lora, 3 experts") / _ms(tables, "base alone, 4 rows"), 1.15)

    def an_expert() -> Claim:
        statement = "from 1 to 8 LoRA experts: how much longer each makes a step, as a share of that with one"
        more = _ms(tables, "lora, 8 experts") / _ms(tables, "lora, 1 experts") - 1
        return at_most("lora-experts", statement, more / 7, 0.06)

    milliseconds = "base and 3 LoRA experts, batch 1: milliseconds a token"
    memory = "base and 3 LoRA experts: memory of weights and engine over that of the base alone"
    return [
        over_base,
        lambda: at_most("lora-ms", milliseconds, _ms(tables, "lora, 3 experts"), 2.0),
        an_expert,
        lambda: at_most("lora-memory", memory, tables["memory"]["ratio"], 1.15),
    ]


def equality(tables: Tables) -> list[Callable[[], Claim]]:
    same = [row for name, row in tables.items() if name.startswith("equality") and "float32" in name]
    if not same:
        return []
    total, wrong = sum(row["tokens"] for row in same), sum(row["different"] for row in same)
    share = (wrong + sum(row["different_where_fragile"] for row in same)) / total
    tokens = f"float32: share of {total} greedy tokens that are not the reference's"
    far = "float32: the largest difference of a log-probability from the reference's"
    target = "< 0.01, and none but where two tokens tie within rounding"
    return [
        lambda: Claim("equal-tokens", tokens, share, target, share < 0.01 and not wrong),
        lambda: at_most("equal-logprobs", far, max(row["logprob_largest"] for row in same), 1e-4),
    ]


def speculation(tables: Tables) -> list[Callable[[], Claim]]:
    drafted = {name: row for name, row in tables.items() if name.startswith("speculation")}
    found: list[Callable[[], Claim]] = []
    for kind, same in same_texts(list(drafted.values())).items():
        name, texts = KINDS[kind]
        statement = f"trained members: {texts} with and without drafts are the same"
        found.append(partial(Claim, f"speculation-{name}", statement, same, "in every case", same))
    for batch in (1, 4, 16):
        rows = [row for name, row in drafted.items() if name.endswith(f"batch {batch}")]
        statement = f"trained members, batch {batch}: tokens a second over the same engine without drafts"
        if rows:
            ratio = max(row["ratio"] for row in rows)
            found.append(partial(at_least, f"speculation-{batch}", statement, ratio, GAIN))
            found.append(partial(alike, f"speculation-sampled-{batch}", batch, rows))
    return found
