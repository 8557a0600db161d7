"""One task on one model: what lm-eval made of every problem, and what was written for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import lm_eval.api.task
from lm_eval.evaluator import evaluate

from ..text.chat import Chat
from .harness import ComposedLM


@dataclass(frozen=True)
class Problem:
    """One problem of a task, answered by one model."""

    id: str
    scores: Mapping[str, float]  # by metric and filter, as lm-eval names them: "exact_match,flexible-extract"
    text: str = ""
    tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None
    seconds: float = 0.0
    prompt_tokens: int = 0


@dataclass(frozen=True)
class Outcome:
    """A task's problems, in its order."""

    task: str
    problems: list[Problem] = field(default_factory=list)

    def scores(self, metric: str) -> list[float]:
        return [problem.scores[metric] for problem in self.problems]


def run_task(lm: ComposedLM, task: Any, limit: int | None = None, chat: Chat | None = None) -> Outcome:
    """Have lm-eval ask, filter and judge; in a chat, with its examples inside the user's turn, as lm-eval does."""
    name = task.config.task
    with _without_bars():
        result = evaluate(
            lm,
            {name: task},
            limit=limit,
            bootstrap_iters=0,
            log_samples=True,
            apply_chat_template=chat is not None,
            system_instruction=chat.system if chat is not None else None,
        )
    assert result is not None, "one process only"
    scores: dict[int, dict[str, float]] = {}
    asked: dict[int, list[Any]] = {}
    for sample in result["samples"][name]:
        scores.setdefault(sample["doc_id"], {}).update(
            {f"{metric},{sample['filter']}": float(sample[metric]) for metric in sample["metrics"]}
        )
        asked[sample["doc_id"]] = sample["arguments"]
    return Outcome(name, [_problem(lm, task, number, scores[number], asked[number]) for number in sorted(scores)])


@contextmanager
def _without_bars() -> Iterator[None]:
    """lm-eval's bars for building prompts, which takes no time; how far the writing is, we show ourselves."""
    before = lm_eval.api.task.tqdm
    lm_eval.api.task.tqdm = lambda items, **options: items
    try:
        yield
    finally:
        lm_eval.api.task.tqdm = before


def _problem(lm: ComposedLM, task: Any, number: int, scores: dict[str, float], asked: list[Any]) -> Problem:
    if task.OUTPUT_TYPE != "generate_until":
        return Problem(str(number), scores)
    entry = lm.entry(*asked[0])
    written = {key: entry[key] for key in ("text", "tokens", "finish_reason", "error", "seconds", "prompt_tokens")}
    return Problem(str(number), scores, **written)
