"""What routing loses where less is given, or something wrong; on smaller sets of experts; in conversations."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tessellm.routing.decision import DecisionWeights

from .cache import Table
from .measures import averaged, cells, route, share, summary
from .signals import SignalMaker

SETS, SIZES = 10, (5, 10)


def robustness(
    table: Table, features_PFK: Tensor, embedders: Sequence[str], weights: DecisionWeights
) -> dict[str, Any]:
    everybody = list(range(len(table.experts)))
    maker = SignalMaker(table, features_PFK, embedders, everybody)
    missing, wrong = mixed(len(everybody), 0)
    rotated = [*everybody[1:], everybody[0]]
    cases = {
        "nothing": maker.nothing(),
        "sentences": maker.described(),
        "terse descriptions": maker.described("terse"),
        "half have none": maker.described(given=missing),
        "half have another's": maker.described(given=wrong),
        "all have another's": maker.described(given=rotated),
    }
    found: dict[str, Any] = {}
    for name, signals in cases.items():
        outcome = route(table, signals, weights, everybody)
        found[name] = summary(table, outcome, everybody)
        if name in ("nothing", "sentences"):
            found[name] |= {
                part: {
                    "skills": share(cells(table, outcome.right_P, part, _with_prompts(table, part))),
                    "plain": share(cells(table, outcome.right_P, part, [-1])),
                }
                for part in ("conversations.test", "conversations.test.last")
            }
    for size in SIZES:
        for name in ("nothing", "sentences"):
            found[f"{size} experts, {name}"] = _small_sets(table, features_PFK, embedders, weights, size, name)
    return found


def mixed(experts: int, seed: int) -> tuple[list[int], list[int]]:
    """Return whose descriptions experts have where half of them have none, and where half have another's."""
    order = random.Random(seed).sample(range(experts), experts)
    changed = order[experts // 2 :]
    following = dict(zip(changed, [*changed[1:], changed[0]], strict=True))
    kept = set(order[: experts // 2])
    return (
        [each if each in kept else -1 for each in range(experts)],
        [following.get(each, each) for each in range(experts)],
    )


def _with_prompts(table: Table, part: str) -> list[int]:
    return sorted({int(each) for each in table.label_P[table.is_part(part)] if each >= 0})


def _small_sets(
    table: Table, features_PFK: Tensor, embedders: Sequence[str], weights: DecisionWeights, size: int, name: str
) -> dict[str, Any]:
    """Return the mean over random sets of experts."""
    parts: dict[str, list[Any]] = {}
    for seed in range(SETS):
        experts = sorted(random.Random(seed).sample(range(len(table.experts)), size))
        maker = SignalMaker(table, features_PFK, embedders, experts)
        signals = maker.nothing() if name == "nothing" else maker.described()
        outcome = averaged([route(table, signals, weights, experts)])
        for part in ("seen", "unseen"):
            parts.setdefault(part, []).extend(cells(table, outcome.right_P, part, experts))
        parts.setdefault("near", []).extend(cells(table, outcome.right_P, "near.test", [-1]))
    return {part: share(groups) for part, groups in parts.items()}
