"""Compositions of trained trig provers, on problems that need one, two or three identities.

An expert's strength says how far its weights are from the base's towards the trained ones: 1 is as trained. What a
composition is asked needs only identities that its experts know. One kind of problem beside that needs another: there
the composition copies lines with confidence and proves nothing, which no trace can tell; it is marked `missing`.

Everything is greedy: the diagnosis reads what the composition writes, the accuracy is the checker's on other problems.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tessellm.compose import compose
from tessellm.diagnose.interference import rows_of
from tessellm.diagnose.trace import trace_generation

from ..common.stacked import Params, to_llama
from ..trig.members import KEPT, MEMBERS, NUMBER, PADDING, SHAPE, load, missing
from ..trig.problems import NAMES, random_problem
from ..trig.proofs import DOT, Proof, check
from ..trig.trained import padded, words
from .compositions import Judged


@dataclass(frozen=True)
class Plan:
    strengths: tuple[float, ...]
    rules: tuple[tuple[str, float], ...]  # with the experts' weight
    prompts: int  # of each kind, unlabelled
    tests: int


QUICK = Plan((0.7, 1.0), (("evidence", 1.0), ("product", 1.0)), 8, 16)
FULL = Plan((0.6, 0.7, 0.8, 1.0), (("evidence", 1.0), ("product", 1.0), ("product", 0.7)), 32, 96)


def judged(seed: int, size: str, device: str, log: Callable[[str], None]) -> Iterator[Judged]:
    if not KEPT.is_file():
        log(f"trig is left out: {missing(KEPT)}")
        return
    plan, members = FULL if size == "full" else QUICK, load(KEPT)[0]
    rng = random.Random(f"prediction/{seed}")
    pair = tuple(sorted(rng.sample(NAMES, 2)))
    asked = {experts: groups(experts, plan.prompts + plan.tests, rng) for experts in (pair, NAMES)}
    for strength in plan.strengths:
        models = provers(members, strength, device)
        for experts, (rule, weight) in itertools.product(asked, plan.rules):
            about = {"strength": strength, "experts": len(experts), "rule": rule, "weight": weight}
            named = {f"expert_{NAMES.index(name)}": models[name] for name in experts}
            model = compose(models["base"], named, rule=rule, weights=dict.fromkeys(named, weight))
            yield from judge(model, asked[experts], plan.prompts, about)
        log(f"trig: experts of strength {strength:g}")


def groups(experts: Sequence[str], count: int, rng: random.Random) -> dict[int, list[Proof]]:
    """Problems by how many of the experts' identities they need; 0: one that no expert knows."""
    kinds = {n: [frozenset(some) for some in itertools.combinations(experts, n)] for n in range(1, len(experts) + 1)}
    unknown = [frozenset([name]) for name in NAMES if name not in experts]
    kinds |= {0: unknown} if unknown else {}
    return {n: [random_problem(rng.choice(some), rng, test=True) for _ in range(count)] for n, some in kinds.items()}


def provers(members: Params, strength: float, device: str) -> dict[str, Any]:
    """The base, and the experts at this strength, as language models that know how they end."""
    weaker = {name: p[:1] + strength * (p - p[:1]) for name, p in members.items()}
    found = {name: to_llama(weaker, SHAPE, MEMBERS.index(name)).to(device) for name in ("base", *NAMES)}
    for model in found.values():
        model.config.eos_token_id = model.generation_config.eos_token_id = NUMBER[DOT]
    return found


def judge(model: Any, asked: dict[int, list[Proof]], prompts: int, about: dict[str, Any]) -> Iterator[Judged]:
    """All kinds of problems in one batch: the first of each are the diagnosis's, the others are checked."""
    everything = [problem for group in asked.values() for problem in group]
    ids_BT, longest = padded(everything, model.device)
    mask_BT = ids_BT != PADDING
    made_BT, trace = trace_generation(
        model, ids_BT, mask_BT, do_sample=False, max_new_tokens=longest, pad_token_id=PADDING
    )
    first = 0
    for needs, group in asked.items():
        seen = [trace.text(n, trace.scored[n]) for n in range(first, first + prompts)]
        written = [words(made_BT[n, ids_BT.shape[1] :].tolist()) for n in range(first + prompts, first + len(group))]
        proved = [check(p.left, p.right, w).proved for p, w in zip(group[prompts:], written, strict=True)]
        share = sum(proved) / len(proved)
        first += len(group)
        yield Judged("trig", {**about, "needs": needs, "missing": not needs}, rows_of(seen), share)
