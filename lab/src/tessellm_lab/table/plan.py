"""How large everything is: on a CPU, and on one GPU."""

from __future__ import annotations

from dataclasses import dataclass

from .members import Stage
from .problems import Level


@dataclass(frozen=True)
class Plan:
    """One size of the experiment."""

    level: Level
    width: int
    layers: int
    heads: int
    vocabulary: int
    texts: int  # a reader's
    base: Stage
    experts: Stage
    lora: Stage
    rank: int
    seeds: int
    problems: int  # of a kind, for tests
    development: int  # of a kind, for the strengths of merges
    slots: int
    loops: int  # problems that a notebook's loop writes for
    context: int = 256
    new_tokens: int = 128


PLANS = {
    "cpu": Plan(
        Level(largest=9, events=(2, 2), operations=6, lines=(1, 2)), width=64, layers=2, heads=2, vocabulary=700,
        texts=8_000, base=Stage(600, 16, 4e-3, 900.0), experts=Stage(800, 16, 3e-3, 900.0),
        lora=Stage(600, 16, 6e-3, 900.0), rank=16, seeds=1, problems=40, development=20, slots=16, loops=3,
    ),
    "full": Plan(
        Level(largest=99, events=(2, 3), operations=20, lines=(1, 3)), width=512, layers=7, heads=8, vocabulary=1024,
        texts=200_000, base=Stage(2_000, 192, 1e-3, 38.0), experts=Stage(1_800, 128, 6e-4, 60.0),
        lora=Stage(900, 128, 2e-3, 25.0), rank=32, seeds=3, problems=120, development=50, slots=128, loops=12,
    ),
}  # fmt: skip
