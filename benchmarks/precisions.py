"""What a precision costs on a CPU: SmolLM2 with twenty LoRA experts in float32, bfloat16, int8 and int4.

    nats       of the reference answers, a token: the right expert's, and the base's where no skill is concerned
    routing    share of prompts that reach the right member; the router is calibrated with the weights that run
    speed      of the base alone, in turns: --speed

Run: python benchmarks/precisions.py --parts FOLDER DTYPE…, which keeps what it found there; without a dtype, the table
of all that was found is written to results/precisions.json. Texts are the same for all, so differences are paired.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import tessellm
from tessellm.bench.measure import engine_steps, random_prompts
from tessellm.engine.engine import Engine
from tessellm.files import write_text
from tessellm.model.variants import alone
from tessellm_lab.common.claims import Claim, Result
from tessellm_lab.proving.skills import BASE, TWENTY, Places, ordinary_prompts, skill_prompts
from tessellm_lab.real.skills import read

HERE = Path(__file__).resolve().parent.parent
RESULTS, REAL = HERE / "results", HERE / "data" / "real"
PRECISIONS = ("float32", "bfloat16", "int8", "int4")
PROMPT, NEW, ROUNDS = 256, 24, 5  # of the speed
PER_CELL, PLAIN = 6, 40  # prompts of a skill and wording; texts that concern no skill
LONGEST = 256  # tokens of an answer that count


def composed(places: Places, dtype: str) -> Any:
    lines = places.descriptions()
    experts = {name: {"source": places.adapter(name), "description": lines[name]} for name in TWENTY}
    return tessellm.compose(places.base, experts, rule="mixture", dtype=dtype)


@torch.inference_mode()
def nats(model: Any, member: str, prompt: str, answer: str) -> tuple[float, int]:
    """Return the nats of an answer, and its tokens."""
    chat = [{"role": "user", "content": prompt}]
    head = model.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    tail = model.tokenizer(answer, add_special_tokens=False).input_ids[:LONGEST]
    ids_1T = torch.tensor([[*head, *tail]])
    logits_TV = model.member_logits(member, ids_1T, None, len(tail) + 1, {})[0, :-1]
    logp_T = logits_TV.float().log_softmax(-1).gather(-1, torch.tensor(tail)[:, None])
    return -logp_T.sum().item(), len(tail)


def measured(dtype: str) -> dict[str, Any]:
    """Return a precision's nats by text and its routes by prompt."""
    places, start = Places.found(), time.perf_counter()
    model = composed(places, dtype)
    texts = [(each.expected, each.text, each.answer) for each in skill_prompts(places, TWENTY, PER_CELL)]
    plain = [(BASE, line.prompt, line.answer) for line in read(REAL, "plain", "test", PLAIN)]
    found = [(name, *nats(model, name, prompt, answer)) for name, prompt, answer in [*texts[::2], *plain] if answer]
    asked = [*skill_prompts(places, TWENTY, PER_CELL), *ordinary_prompts(places)]
    routes = [[each.cell, each.expected, model.route([each.text])[0].selected] for each in asked]
    return {"nats": found, "routes": routes, "seconds": time.perf_counter() - start}


def speeds() -> dict[str, dict[str, float]]:
    """Return each precision's milliseconds to the first token of a prompt, and a step after it."""
    adapter, engines = Places.found().adapter("math"), {}
    for dtype in PRECISIONS:
        model = tessellm.compose("smollm2", {"math": adapter}, rule="product", dtype=dtype)
        engines[dtype] = Engine(alone(model, BASE), 1, PROMPT + NEW)
    rows = random_prompts(model, [PROMPT])
    found: dict[str, list[Any]] = {dtype: [] for dtype in PRECISIONS}
    for _ in range(ROUNDS + 1):
        for dtype, engine in engines.items():
            found[dtype].append(engine_steps(engine, rows, NEW))
    medians = {dtype: list(map(statistics.median, zip(*own[1:], strict=True))) for dtype, own in found.items()}
    return {dtype: {"first_ms": 1e3 * first, "step_ms": 1e3 * step} for dtype, (first, step) in medians.items()}


def table(parts: dict[str, Any], speed: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """Return a row per precision; differences are to the first one's, text by text, with their standard errors."""
    rows, first = [], next(iter(parts.values()))
    for dtype, part in parts.items():
        row: dict[str, Any] = {"precision": dtype, **speed[dtype]}
        for name, of_base in (("experts", False), ("base", True)):
            pairs = [
                (own[1] / own[2], ref[1] / ref[2])
                for own, ref in zip(part["nats"], first["nats"], strict=True)
                if (own[0] == BASE) == of_base
            ]
            row[f"nats_{name}"] = statistics.mean(own for own, _ in pairs)
            gaps = [own - ref for own, ref in pairs]
            row[f"nats_{name}_difference"] = statistics.mean(gaps)
            row[f"nats_{name}_error"] = statistics.stdev(gaps) / len(gaps) ** 0.5
        for cell in ("seen", "unseen", "plain", "near"):
            right = [expected == selected for own, expected, selected in part["routes"] if own == cell]
            row[f"routed_{cell}"] = statistics.mean(right)
        same = [own[2] == ref[2] for own, ref in zip(part["routes"], first["routes"], strict=True)]
        rows.append({**row, "routes_as_float32": statistics.mean(same), "prompts": len(same)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("dtypes", nargs="*", choices=[[], *PRECISIONS])
    parser.add_argument("--parts", type=Path, required=True)
    parser.add_argument("--speed", action="store_true")
    options = parser.parse_args()
    if options.speed:
        write_text(options.parts / "speed.json", json.dumps(speeds()))
        return
    for dtype in options.dtypes:
        write_text(options.parts / f"{dtype}.json", json.dumps(measured(dtype)))
    if options.dtypes:
        return
    parts = {each: json.loads((options.parts / f"{each}.json").read_text()) for each in PRECISIONS}
    rows = table(parts, json.loads((options.parts / "speed.json").read_text()))
    claims = [
        Claim(
            f"{row['precision']} {name}",
            f"{row['precision']}: nats a token over float32's, {what}",
            round(row[f"nats_{name}_difference"], 4),
        )
        for row in rows[1:]
        for name, what in (("experts", "the right expert"), ("base", "the base"))
    ]
    claims += [
        Claim(
            f"{row['precision']} routes", f"{row['precision']}: prompts routed as in float32", row["routes_as_float32"]
        )
        for row in rows[1:]
    ]
    seconds = sum(part["seconds"] for part in parts.values())
    Result("precisions", claims, 0, "cpu", seconds, tables={"rows": rows}).write(RESULTS)
    for row in rows:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
