"""Every column writes for every problem, by the engine; and how long a notebook's loop takes for some of them."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tessellm.errors import CheckpointError
from tessellm.evaluate.writer import Ask, BlockWriter, Written
from tessellm.files import stored
from tessellm.model import ComposedForCausalLM
from tessellm.text.options import TextOptions
from tessellm.text.stops import stop_position

from ..common.loops import Loop
from .models import COLUMNS
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
    return [Ask(tuple(tokenizer(problem.prompt)["input_ids"]), TextOptions(new_tokens)) for problem in asked]


def cut(written: Written, kind: str) -> Written:
    """What came before the first stop text. Nearly all texts end by themselves, and to read each after every token
    takes longer than to write it."""
    end = stop_position(written.text, STOPS[kind])
    return written if end is None else replace(written, text=written.text[:end], finish_reason="stop")


def write_column(
    model: ComposedForCausalLM,
    name: str,
    asked: Mapping[str, Sequence[Problem]],
    seed: int,
    new_tokens: int,
    slots: int,
) -> tuple[list[Sample], Pace]:
    """Samples in the problems' order. A kind at a time, the longest first: the engine is kept, and none of them has the
    tokens that compiling a rule is worth."""
    since, writer = time.perf_counter(), BlockWriter(model, slots)
    samples: list[Sample] = []
    for kind in sorted(asked, key=lambda kind: -max(len(problem.prompt) for problem in asked[kind])):
        written = dict(writer.write(asks(model.tokenizer, asked[kind], new_tokens)))
        samples += [
            Sample(seed, name, kind, number, **asdict(cut(written[number], kind))) for number in sorted(written)
        ]
    return samples, Pace(time.perf_counter() - since, sum(sample.tokens for sample in samples))


def read_samples(path: Path, asked: Mapping[str, Sequence[Problem]], seed: int) -> list[Sample]:
    """What was kept of a seed, if it is just that: one sample of each column for each problem."""
    with stored(path):
        samples = [Sample(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
        found = Counter((sample.seed, sample.column, sample.kind, sample.number) for sample in samples)
        if not all(isinstance(sample.text, str) and isinstance(sample.tokens, int) for sample in samples):
            raise ValueError("a sample without its text or its number of tokens")
    numbers = [(kind, number) for kind, some in asked.items() for number in range(len(some))]
    expected = Counter((seed, column, kind, number) for column in COLUMNS for kind, number in numbers)
    missing, others = (expected - found).total(), (found - expected).total()
    if missing or others:
        raise CheckpointError(
            f"{path} should have {expected.total()} samples of seed {seed}, one of each column for each problem: "
            f"{missing} are missing, and {others} are others. Restore it, or remove it to write new ones"
        )
    return samples


def fingerprint(path: Path) -> str:
    """The SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def check_unchanged(samples: Path, facts: Path) -> None:
    """Refuse samples that are not those that were written: who edits a text edits a score."""
    with stored(facts):
        written = json.loads(facts.read_text(encoding="utf-8"))["samples"]
    if fingerprint(samples) != written:
        raise CheckpointError(
            f"{samples} was changed after it was written: its SHA-256 is not the one in {facts.name}. Restore it, or "
            "remove it to write new ones"
        )


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
