"""One seed of the experiment, from texts to samples: members trained, merged, composed, and writing."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import cache
from typing import Any

import torch

from tessellm.provenance import environment

from ..common.stacked import Params, Shape, select
from ..common.steps import Steps
from ..merging.merges import METHODS
from .analysis import analyse
from .gold import gold_texts
from .members import EXPERTS, train_base, train_experts, with_deltas
from .models import EQ2, columns, llama, tuned
from .plan import Plan
from .problems import KINDS, Problem, digest, problems
from .texts import READERS
from .tokens import library, make_tokenizer
from .writing import Sample, notebook_pace, write_column

Log = Callable[[str], None]


class Library:
    """The tokenizer and what every reader reads: the same for all seeds."""

    def __init__(self, plan: Plan, log: Log):
        since = time.perf_counter()
        self.tokenizer = make_tokenizer(plan.level, plan.vocabulary, min(plan.texts, 20_000))
        processes = max(1, (os.cpu_count() or 1) - 1) if plan.texts >= 100_000 else 1
        self.texts = library(self.tokenizer, plan.level, plan.texts, processes=processes)
        tokens = sum(sum(texts.length_N) for texts in self.texts.values())
        log(f"{len(READERS) * plan.texts:,} texts of {tokens:,} tokens in {time.perf_counter() - since:.0f} s")


@cache
def held_out(plan: Plan, seed: int) -> dict[str, list[Problem]]:
    return {kind: problems(kind, plan.problems, plan.level, seed) for kind in KINDS}


def key(plan: Plan, seed: int) -> str:
    """What must be the same for samples to be this seed's."""
    return digest([problem for asked in held_out(plan, seed).values() for problem in asked])


def make(plan: Plan, seed: int, library: Library, device: str, log: Log) -> tuple[list[Sample], dict[str, Any]]:
    """What every column wrote for this seed's problems, and all that was measured on the way."""
    since, spent = time.perf_counter(), dict[str, float]()

    def lap(what: str) -> None:
        spent[what] = time.perf_counter() - since - sum(spent.values())

    tokenizer = library.tokenizer
    shape = Shape(len(tokenizer), plan.width, plan.layers, plan.heads, plan.context)
    generator = torch.Generator(device).manual_seed(seed)
    stages = {"base": plan.base, "experts": plan.experts, "LoRA experts": plan.lora}
    steps = {name: Steps(name, stage.steps, log) for name, stage in stages.items()}
    base = train_base(shape, library.texts["base"], plan.base, generator, steps["base"])
    lap("base")
    experts = train_experts(base, shape, library.texts, plan.experts, generator, steps["experts"])
    lap("experts")
    deltas = train_experts(base, shape, library.texts, plan.lora, generator, steps["LoRA experts"], plan.rank)
    lora = with_deltas(select(base, [0] * len(EXPERTS)), deltas)
    lap("LoRA experts")

    def models(params: Params) -> dict[str, Any]:
        return {name: llama(params, shape, number, tokenizer, device) for number, name in enumerate(EXPERTS)}

    base_model, expert_models, lora_models = llama(base, shape, 0, tokenizer, device), models(experts), models(lora)
    members = [base_model, *expert_models.values()]
    development = {
        kind: gold_texts(tokenizer, problems(kind, plan.development, plan.level, seed, "development"), device)
        for kind in KINDS
    }
    made = {method: tuned(method, members, development, seed) for method in METHODS}
    lap("merges")
    asked = held_out(plan, seed)
    why = {kind: analyse(members, gold_texts(tokenizer, some, device)) for kind, some in asked.items()}
    lora_members = [base_model, *lora_models.values()]
    why |= {f"LoRA {kind}": analyse(lora_members, gold_texts(tokenizer, some, device)) for kind, some in asked.items()}
    for kind, found in why.items():
        log(f"{kind}: would be written exactly: {found['exact']}")
    lap("analysis")
    merges = {method: model for method, (model, _) in made.items()}
    samples, pace = write_all(
        plan, columns(base_model, expert_models, lora_models, merges, tokenizer), asked, seed, log
    )
    lap("writing")
    facts = {
        "seed": seed,
        "problems": key(plan, seed),
        "plan": asdict(plan),
        "parameters": base_model.num_parameters(),
        "tokens": len(tokenizer),
        "merges": {method: told for method, (_, told) in made.items()},
        "analysis": why,
        "pace": pace,
        "steps": {name: each.kept() for name, each in steps.items()},
        "seconds": spent,
        **environment(),
    }
    return samples, facts


def write_all(
    plan: Plan, models: Mapping[str, Any], asked: Mapping[str, list[Problem]], seed: int, log: Log
) -> tuple[list[Sample], dict[str, Any]]:
    """Every column's samples; the pace of each, and that of a notebook's loop on some of the problems."""
    samples: list[Sample] = []
    pace: dict[str, Any] = {}
    for name, model in models.items():
        own, took = write_column(model, name, asked, seed, plan.new_tokens, plan.slots)
        samples += own
        pace[name] = asdict(took)
        log(f"{name}: {took.tokens:,} tokens in {took.seconds:.1f} s")
        if name == EQ2:
            some = [sample for sample in own if sample.kind == "mixed"][: plan.loops]
            took = notebook_pace(model, asked["mixed"][: plan.loops], some, plan.new_tokens)
            pace["a notebook's loop"] = asdict(took)
            log(f"a notebook's loop: {took.tokens:,} tokens in {took.seconds:.1f} s")
    return samples, pace
