"""Weights of Eq. 2 by task score: those under which the composition solves most development problems.

Weights are searched one expert at a time among given values, until nothing gets better. A share of the development
problems is not looked at meanwhile and judges what was found. Test problems are never asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from ..evaluate.intervals import Difference, compare
from ..evaluate.runner import Runner, headline_scores
from ..evaluate.splits import Development, Part
from ..model import ComposedForCausalLM
from ..model.variants import with_rule
from .likelihood import check_product

PASSES = 3  # over all experts, at most
DEVELOP = Part(50)

Scores = dict[str, list[float]]  # of each task, problem by problem


@dataclass(frozen=True)
class Trial:
    """Weights, and what it scored on the problems that were tuned on: by task, and their mean."""

    weights: dict[str, float]
    score: float
    tasks: dict[str, float]


@dataclass(frozen=True)
class ScoreTuning:
    """What was found. Scores are means over tasks; held out are problems that were not tuned on."""

    weights: dict[str, float]
    before: float
    after: float
    held_out_before: float | None
    held_out_after: float | None
    difference: Difference | None  # after minus before on the problems held out, paired
    problems: int
    held_out_problems: int
    development: dict[str, Development]
    trials: list[Trial]


class Search:
    """Weights of one composition, tried on the development problems of some tasks. `journals` is a folder that a
    killed search goes on from."""

    def __init__(
        self,
        model: ComposedForCausalLM,
        runner: Runner,
        tasks: Sequence[str],
        part: Part = DEVELOP,
        held_out: float = 0.25,
        journals: Path | None = None,
        tried: Callable[[Trial], None] = lambda trial: None,
    ):
        check_product(model)
        self.model, self.runner, self.journals, self.tried = model, runner, journals, tried
        self.part = Part(part.develop, part.seed, development=True)
        self.development = runner.check(tasks, part)
        sizes = {task: len(found.places) for task, found in self.development.items()}
        self.tuned_on = {task: round(size * (1 - held_out)) or 1 for task, size in sizes.items()}
        self.trials: dict[tuple[float, ...], Trial] = {}

    def scores(self, weights: Sequence[float], all_of_them: bool = False) -> Scores:
        """Problem by problem; the problems held out come last, if at all."""
        candidate = with_rule(self.model, self.model.config.rule["name"], weights)
        name = "-".join(f"{each:g}" for each in weights)
        journals = self.journals / name if self.journals is not None else None
        outcomes: dict[str, Any] = {}
        for task, count in self.tuned_on.items():
            limit = None if all_of_them else count
            outcomes |= dict(self.runner.run(name, candidate, [task], journals, self.part, limit))
        return headline_scores(outcomes)

    def trial(self, weights: Sequence[float]) -> Trial:
        key = tuple(weights)
        if key not in self.trials:
            means = {task: fmean(scores) for task, scores in self.scores(weights).items()}
            named = dict(zip(self.model.config.member_names[1:], weights, strict=True))
            self.trials[key] = Trial(named, fmean(means.values()), means)
            self.tried(self.trials[key])
        return self.trials[key]

    def held_out(self, trial: Trial) -> Scores:
        """Of the problems that were not tuned on."""
        scores = self.scores(list(trial.weights.values()), all_of_them=True)
        return {task: rest for task, each in scores.items() if (rest := each[self.tuned_on[task] :])}

    def climb(self, values: Sequence[float]) -> Trial:
        """From the composition's own weights, one expert at a time, to where no value of any is better."""
        best = self.trial(self.model.config.weights)
        for _ in range(PASSES):
            before = best
            for expert in best.weights:
                around = [self.trial([*{**best.weights, expert: value}.values()]) for value in values]
                best = max([best, *around], key=lambda trial: trial.score)  # the first of equals
            if best == before:
                break
        return best


def tune_by_score(search: Search, values: Sequence[float] = (0.5, 0.75, 1.0, 1.25, 1.5)) -> ScoreTuning:
    """Find the best weights; where they are worse than the composition's own on the problems held out, those stay."""
    start, best = search.trial(search.model.config.weights), search.climb(values)
    counts, sizes = search.tuned_on, {task: len(found.places) for task, found in search.development.items()}
    before, after = ({}, {}) if counts == sizes else (search.held_out(trial) for trial in (start, best))
    if after and _mean(after) < _mean(before):
        best, after = start, before
    return ScoreTuning(
        weights=best.weights,
        before=start.score,
        after=best.score,
        held_out_before=_mean(before) if before else None,
        held_out_after=_mean(after) if after else None,
        difference=compare(_flat(after), _flat(before)) if after else None,
        problems=sum(counts.values()),
        held_out_problems=sum(sizes.values()) - sum(counts.values()),
        development=search.development,
        trials=list(search.trials.values()),
    )


def _mean(scores: Scores) -> float:
    return fmean(fmean(each) for each in scores.values())


def _flat(scores: Scores) -> list[float]:
    return [score for each in scores.values() for score in each]
