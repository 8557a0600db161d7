"""`reproduce two-skills`: prompts that concern two skills, answered by the mixture, by either expert, by Eq. 2 of both.

Two requests in one message, and a skill's request to a composition with a style (capitals). The score of an answer is
the mean of both judges. What answers one request is searched in all runs of lines of the text.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import tessellm
from tessellm.model import ComposedForCausalLM
from tessellm.routing.text import MINILM
from tessellm.statistics import bootstrap

from ..common.claims import Claim, Result
from ..real.tasks import share_of_capitals
from .decisions import CONFIDENCE, share
from .judges import judge
from .skills import FIVE, TWENTY, Places
from .writing import NEW_TOKENS, Answer, Answers, Job, composition_identity
from .written import compose_experts, router_version, row_of

Log = Callable[[str], None]
STYLE = "capitals"
LEFT_OUT = ("medtopic", "fluent", "code", "math")  # long passages or answers; no request in the prompt
STYLED = ("bash", "intents", "sql")
MIXTURE, BETTER, PRODUCT = "mixture", "the better expert", "product"
MOST_LINES = 12
PER_PAIR = 10  # prompts of the same two skills, so that the better expert is not chosen by one answer


@dataclass(frozen=True)
class Part:
    """One of the two things that a prompt asks for."""

    skill: str
    prompt: str
    answer: str


@dataclass(frozen=True)
class Double:
    """A prompt that concerns two skills."""

    kind: str
    text: str
    parts: tuple[Part, Part]

    @property
    def skills(self) -> tuple[str, str]:
        return self.parts[0].skill, self.parts[1].skill

    @property
    def new_tokens(self) -> int:
        return min(128, sum(NEW_TOKENS.get(name, 0) for name in self.skills))

    def score(self, text: str) -> float:
        """Return the mean of both judges."""
        return sum(_judged(part, text, self.kind) for part in self.parts) / 2


@dataclass(frozen=True)
class Plan:
    """How many prompts: two requests, and a request with a style."""

    requests: int
    styled: int
    names: tuple[str, ...] = TWENTY
    styled_names: tuple[str, ...] = FIVE


PLANS = {"cpu": Plan(20, 10), "full": Plan(110, 48)}


def run(seed: int, out: Path, size: str, log: Log = print) -> Result:
    """Return claims and tables."""
    return measure(Places.found(), PLANS[size], seed, out, size, log)


def measure(places: Places, plan: Plan, seed: int, out: Path, size: str, log: Log = print) -> Result:
    """Return the same with places and a plan of the caller's."""
    since = time.monotonic()
    folder = out / "two-skills"
    made = {
        "two requests": (two_requests(places, plan.names, plan.requests, seed), compose_experts(places, plan.names)),
        "a request and a style": (
            styled_requests(places, plan.styled_names, plan.styled),
            _with_style(places, plan.styled_names),
        ),
    }
    tables = {
        kind: _table(doubles, model, places, seed, folder / kind.replace(" ", "-"), log)
        for kind, (doubles, model) in made.items()
        if doubles
    }
    return Result("two-skills", _claims(tables), seed, size, time.monotonic() - since, (), tables)


def two_requests(places: Places, names: Sequence[str], count: int, seed: int) -> list[Double]:
    """Return messages that ask for two things, of two skills each, drawn by the seed."""
    draw, kept = random.Random(seed), [name for name in names if name not in LEFT_OUT]
    found = []
    pairs = [draw.sample(kept, 2) for _ in range(-(-count // PER_PAIR))]
    for number in range(count):
        parts = []
        for name in pairs[number // PER_PAIR]:
            examples = places.examples(name, "test")
            example = examples[number % len(examples)]
            parts.append(Part(name, example.prompt, example.answer))
        text = f"Do two things.\nFirst: {parts[0].prompt}\nSecond: {parts[1].prompt}"
        found.append(Double("two requests", text, (parts[0], parts[1])))
    return found


def styled_requests(places: Places, names: Sequence[str], count: int) -> list[Double]:
    """Return a skill's prompts; the style is not asked for, it is the composition's."""
    skills = [name for name in STYLED if name in names]
    found = []
    for number in range(count if skills else 0):
        name = skills[number % len(skills)]
        example = places.examples(name, "test")[number // len(skills)]
        parts = (Part(name, example.prompt, example.answer), Part(STYLE, example.prompt, ""))
        found.append(Double("a request and a style", example.prompt, parts))
    return found


def _with_style(places: Places, names: Sequence[str]) -> ComposedForCausalLM:
    described = places.descriptions()
    experts: dict[str, Any] = {
        name: {"source": str(places.adapter(name)), "description": described[name]} for name in names
    }
    experts[STYLE] = {"source": str(places.five / STYLE), "style": True}
    return tessellm.compose(places.base, experts, embedder=MINILM, dtype="float32")


def _judged(part: Part, text: str, kind: str) -> float:
    if part.skill == STYLE:
        return share_of_capitals(text)
    if kind == "two requests":
        return max(judge(part.skill, part.prompt, piece, part.answer) for piece in _pieces(text))
    return judge(part.skill, part.prompt.lower(), text.lower(), part.answer.lower())


def _pieces(text: str) -> list[str]:
    """Return the text, and every run of its lines."""
    lines = text.strip().split("\n")[:MOST_LINES]
    runs = ["\n".join(lines[start:stop]) for start in range(len(lines)) for stop in range(start + 1, len(lines) + 1)]
    return [text, *(run for run in runs if run.strip())]


def _table(
    doubles: Sequence[Double], model: ComposedForCausalLM, places: Places, seed: int, out: Path, log: Log
) -> dict[str, Any]:
    names = list(model.members)[1:]
    folders = {name: places.five / name if name == STYLE else places.adapter(name) for name in names}
    answers = Answers(model, composition_identity(folders, router=router_version()), out, log)
    rows = [row_of(model, double.text) for double in doubles]

    def written(experts: Sequence[tuple[str, ...] | None]) -> list[Answer]:
        return answers.of(
            [Job(row, d.new_tokens, chosen) for row, d, chosen in zip(rows, doubles, experts, strict=True)]
        )

    texts = {
        MIXTURE: written([None for _ in doubles]),
        "first": written([d.skills[:1] for d in doubles]),
        "second": written([d.skills[1:] for d in doubles]),
        PRODUCT: written([d.skills for d in doubles]),
    }
    scores = {title: [d.score(a.text) for d, a in zip(doubles, found, strict=True)] for title, found in texts.items()}
    scores[BETTER] = _better(doubles, scores.pop("first"), scores.pop("second"))
    routed = [set(a.active) & set(d.skills) for d, a in zip(doubles, texts[MIXTURE], strict=True)]
    return {
        "scores": {title: share(values, seed) for title, values in scores.items()},
        "mixture less": {
            title: _difference(scores[MIXTURE], values, seed) for title, values in scores.items() if title != MIXTURE
        },
        "prompts": len(doubles),
        "one of the two skills runs": sum(map(bool, routed)) / len(doubles),
        "both run": sum(len(each) == 2 for each in routed) / len(doubles),
        "texts": [
            {
                "prompt": d.text[:300],
                "skills": d.skills,
                **{title: found[n].text[:300] for title, found in texts.items()},
            }
            for n, d in enumerate(doubles[:8])
        ],
    }


def _better(doubles: Sequence[Double], first: Sequence[float], second: Sequence[float]) -> list[float]:
    """Return the scores of the single expert per pair of skills that does better on that pair's prompts."""
    pairs: dict[tuple[str, str], list[int]] = {}
    for n, double in enumerate(doubles):
        pairs.setdefault(double.skills, []).append(n)
    found = [0.0] * len(doubles)
    for places in pairs.values():
        best = max((first, second), key=lambda values: sum(values[n] for n in places))
        for n in places:
            found[n] = best[n]
    return found


def _difference(ours: Sequence[float], theirs: Sequence[float], seed: int) -> dict[str, float]:
    values = torch.tensor(ours, dtype=torch.float64) - torch.tensor(theirs, dtype=torch.float64)
    low, high = bootstrap(values, torch.ones_like(values), CONFIDENCE, seed)
    return {"mean": float(values.mean()), "low": low, "high": high}


def _claims(tables: Mapping[str, Any]) -> list[Claim]:
    found = []
    for kind, table in tables.items():
        name = kind.replace(" ", "-")
        found.append(Claim(f"{name}-score", f"{kind}: mean of both judges", table["scores"][MIXTURE]["share"]))
        for other, less in table["mixture less"].items():
            statement = f"{kind}: the mixture less {other}, the upper end of the interval is not under 0"
            value = {key: round(number, 4) for key, number in less.items()}
            found.append(
                Claim(f"{name}-{other.replace(' ', '-')}", statement, value, "≥ 0 within it", less["high"] >= 0)
            )
    return found
