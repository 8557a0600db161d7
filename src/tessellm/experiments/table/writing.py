"""Every column writes for every problem, by the engine; and how long a notebook's loop takes for some of them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...continuations import Request
from ...decoding.bench.loops import Loop
from ...evaluate.writer import Ask, Writer
from ...model import ComposedForCausalLM
from .problems import Problem
from .tokens import END

STOPS = {  # those of lm-eval's GSM8K and of evalplus, to which a test holds them
    "math": ("Question:", END, "<|im_end|>"),
    "code": (
        "<|endoftext|>", "<|endofmask|>", END, "\nif __name__", "\ndef main(", "\nprint(",
        "\ndef ", "\nclass ", "\nimport ", "\nfrom ", "\nassert ",
    ),
}  # fmt: skip
STOPS["mixed"] = STOPS["code"]


@dataclass(frozen=True)
class Sample:
    """What one column wrote for one problem."""

    seed: int
    column: str
    kind: str
    number: int
    text: str
    tokens: int
    finish_reason: str
    error: str | None = None


@dataclass(frozen=True)
class Pace:
    """Seconds and tokens of one column, starting the engine included."""

    seconds: float
    tokens: int


def asks(tokenizer: Any, asked: Sequence[Problem], new_tokens: int) -> list[Ask]:
    return [
        Ask(tuple(tokenizer(problem.prompt)["input_ids"]), Request(new_tokens, stop=STOPS[problem.kind]))
        for problem in asked
    ]


def write_column(
    model: ComposedForCausalLM,
    name: str,
    asked: Mapping[str, Sequence[Problem]],
    seed: int,
    new_tokens: int,
    slots: int,
) -> tuple[list[Sample], Pace]:
    """Samples in the problems' order."""
    since = time.perf_counter()
    places = [(kind, number) for kind, problems in asked.items() for number in range(len(problems))]
    every = asks(model.tokenizer, [problem for problems in asked.values() for problem in problems], new_tokens)
    written = dict(Writer(model, slots).write(every))
    samples = [
        Sample(seed, name, *places[number], **asdict(written[number])) for number in range(len(places))
    ]  # fmt: skip
    return samples, Pace(time.perf_counter() - since, sum(sample.tokens for sample in samples))


def notebook_pace(
    model: ComposedForCausalLM, asked: Sequence[Problem], samples: Sequence[Sample], new_tokens: int
) -> Pace:
    """One problem after the other by Eq. 2 in a loop, as many tokens as the engine wrote; the first is not timed."""
    rows = [ask.ids for ask in asks(model.tokenizer, asked, new_tokens)]
    tokens = [sample.tokens for sample in samples]
    _loop(model, rows[0], tokens[0])
    since = time.perf_counter()
    for row, count in zip(rows[1:], tokens[1:], strict=True):
        _loop(model, row, count)
    return Pace(time.perf_counter() - since, sum(tokens[1:]))


def _loop(model: ComposedForCausalLM, row: Sequence[int], tokens: int) -> None:
    loop = Loop(model, [row], to_cpu=True)
    for _ in range(tokens):
        loop.step()
