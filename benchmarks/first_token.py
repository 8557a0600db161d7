"""The first token after a prompt, by kernels and by modules, without preparing all that a server prepares: an engine of
one slot, of which the pass over such a prompt and a step are captured. A part of gpu_latency.py, in a process of its
own for each kind of expert.

What the pass is made of is timed beside it, as graphs of the device alone: the members without the output layer's other
rows, with them, the output layer itself by our kernel and by the library, and the products by one and by the other.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from latency_case import EXPERTS, first_token_ms, matrix_rate, multiplied
from random_models import random_composition
from tessellm.bench.measure import random_prompts
from tessellm.engine.engine import Engine
from tessellm.engine.sampling import Sampling, TokenChoice
from tessellm.model.variants import with_rule

RULES = ("mixture", "product")
PROMPT, LONG = 128, 2048
MANY = 1 << 30
OWN = ("OWN_ROWS", "OWN_ROWS_OF_THREE", "OWN_GATED_ROWS", "OWN_GATED_ROWS_WITH_DELTAS")


class FirstToken:
    """One kind of expert under several rules."""

    def __init__(self, kind: str, given: argparse.Namespace):
        self.quick, self.device = given.quick, torch.device(given.device)
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.model = random_composition(given.shapes, EXPERTS[kind], kind, RULES[0], given.device, dtype)
        self.rate = matrix_rate(self.device, dtype, 512 if self.quick else 8192)
        self.long = 200 if self.quick else LONG

    def all(self) -> Iterator[tuple[str, Any]]:
        """Name and value of one measurement after another, the most important first."""
        yield "matrix_rate", self.rate
        for rule in RULES:
            yield f"{PROMPT} {rule} fused", self.short(rule, fused=True)
        yield f"{self.long} {RULES[0]} fused", self.far(RULES[0], fused=True)
        if self.device.type == "cuda":
            yield "parts", self.parts()
        for rule in RULES:
            yield f"{PROMPT} {rule} modules", self.short(rule, fused=False)
        yield f"{self.long} {RULES[1]} fused", self.far(RULES[1], fused=True)
        yield f"{self.long} {RULES[1]} modules", self.far(RULES[1], fused=False)

    def engine(self, rule: str, context: int, fused: bool) -> Engine:
        engine = Engine(with_rule(self.model, rule), 1, context)
        for group in engine.executor.groups:
            if (kernels := getattr(group, "fused", None)) is not None:
                kernels.reads_prompts = fused
        engine.generate(random_prompts(self.model, [8]), Sampling(2, ignore_end=True))
        return engine

    def short(self, rule: str, fused: bool) -> dict[str, float]:
        """Milliseconds that a user waits, and those of the device's graph."""
        engine = self.engine(rule, 512, fused)
        engine.executor.ready_prompts([PROMPT], TokenChoice.GREEDY)
        found = {"ms": first_token_ms(engine, PROMPT, 25)}
        times: dict[tuple[Any, ...], float] = getattr(engine.executor, "graph_seconds", {})
        return found | {f"graph {key[0]} ms": 1e3 * seconds for key, seconds in times.items()}

    def far(self, rule: str, fused: bool) -> dict[str, float]:
        engine = self.engine(rule, 256 if self.quick else 2560, fused)
        first_token_ms(engine, self.long, 2)
        took = first_token_ms(engine, self.long, 3 if self.quick else 9)
        needed = 2 * self.long * sum(multiplied(self.model.member(name)) for name in self.model.members)
        return {"ms": took, "share_of_matrix_rate": needed / (1e-3 * took) / self.rate}

    @torch.inference_mode()
    def parts(self) -> dict[str, Any]:
        """Milliseconds of the device for a prompt's pass without the rule, and with choices changed."""
        from tessellm.engine.cuda.fused import products, prompts
        from tessellm.engine.cuda.fused.library import wide_logits

        (group,) = self.engine("product", 512, fused=True).executor.work.groups
        fused, members = group.fused, len(group.members)
        if fused is None:
            return {}
        token_1T = torch.tensor(random_prompts(self.model, [PROMPT]), device=self.device)
        position_1T, slot_1 = torch.arange(PROMPT, device=self.device)[None], torch.zeros_like(token_1T[:, 0])
        token_M1T = token_1T.expand(members, 1, -1)

        def read(keep: int) -> Callable[[], Any]:
            return lambda: fused.read(token_M1T, position_1T, slot_1, keep)

        hidden = torch.randn(members, PROMPT, fused.architecture.hidden, dtype=fused.dtype, device=self.device)
        found: dict[str, Any] = {"the last logits": timed(read(1)), "all logits": timed(read(PROMPT))}
        found["output layer, ours"] = timed(lambda: fused.head(hidden))
        found["output layer, library"] = timed(lambda: wide_logits(fused.head, hidden))
        choices: dict[str, dict[tuple[Any, str], Any]] = {
            "products of the library": dict.fromkeys([(products, name) for name in OWN], 0),
            "products of ours": dict.fromkeys([(products, name) for name in OWN], MANY),
            "attention in blocks of 64 cells": {(prompts, "FEW_CELLS"): 64},
        }
        for name, choice in choices.items():
            with changed(choice):
                found[name] = timed(read(1))
        return found


@contextmanager
def changed(choice: dict[tuple[Any, str], Any]) -> Iterator[None]:
    before = {(where, name): getattr(where, name) for where, name in choice}
    for (where, name), value in choice.items():
        setattr(where, name, value)
    try:
        yield
    finally:
        for (where, name), value in before.items():
            setattr(where, name, value)


def timed(work: Callable[[], Any]) -> float | str:
    """Milliseconds of the device; what went wrong, where something did."""
    try:
        return replayed_ms(work)
    except Exception as error:  # one that does not fit
        return f"{type(error).__name__}: {error}"[:300]


def replayed_ms(work: Callable[[], Any], rounds: int = 20, replays: int = 1) -> float:
    """Milliseconds of the device: the median over rounds of replays of a graph."""
    for _ in range(2):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    found = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / replays)
    return statistics.median(found)
