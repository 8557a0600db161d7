"""Merging weights (Eq. 5) beside composing outputs (Eq. 2): equal for linear models, to first order for all; then not.

The linear case is exact. For trained networks two to six experts with disjoint skills are followed as fine-tuning goes
on: what the merged network and the composition get right, the weight disentanglement error, the violation of
Definition 4, and |log Z|. Where do they part, and why?
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tessellm.rules import product, product_scores

from ..common.claims import Claim, Result
from ..common.panels import drawn
from ..common.stacked import Params, select
from ..lengths.members import LAG, SHAPE
from ..theorems.planted import linear_family
from ..theory.definitions import second_largest
from ..theory.theorems import linear_merging, merge_linear, task_arithmetic_violation
from .members import PAIRS, before, fine_tune, forward, merged, strings, tables, train_base

FAMILIES, EXACT = 1000, 1e-10
EXPERTS = (2, 4, 6)
SCALES = (0.01, 0.02, 0.05, 0.1)


@dataclass(frozen=True)
class Effort:
    base_steps: int
    ages: tuple[int, ...]
    batch: int
    strings: int
    rate: float = 3e-4


SIZES = {
    "cpu": Effort(500, (1, 2, 5, 10, 20, 40, 80, 160, 320, 640, 960), 16, 300),
    "full": Effort(2000, (1, 2, 5, 10, 20, 40, 80, 160, 320, 640, 1280, 2560, 5120), 32, 1000),
}


def run(seed: int, out: Path, size: str, log: Callable[[str], None] = print) -> Result:
    """Claims, `task-arithmetic.json` and `task-arithmetic.png` in `out`."""
    from .figure import draw

    started, effort = time.perf_counter(), SIZES[size]
    generator = torch.Generator().manual_seed(seed)
    log(f"training the base, then six experts for {max(effort.ages)} steps")
    base = train_base(effort.base_steps, effort.batch, generator)
    experts = fine_tune(base, effort.ages, effort.batch, effort.rate, generator)
    log("merged against composed, at every age")
    table = [
        {"age": age, "experts": k, **measure(base, experts[age], k, effort.strings, generator)}
        for age in effort.ages
        for k in EXPERTS
    ]
    scaled = first_order(base, experts[max(effort.ages)], effort.strings, generator)
    claims = [*linear_claims(generator), *trained_claims(table, scaled)]
    figures = drawn(lambda: draw(out, table))
    tables_made = {"as fine-tuning goes on": table, "scaled task vectors": scaled}
    seconds = time.perf_counter() - started
    result = Result("task-arithmetic", claims, seed, size, seconds, figures, tables_made)
    result.write(out)
    return result


def linear_claims(generator: torch.Generator) -> Iterator[Claim]:
    """Linear maps: merged outputs under Definition 5; and Eq. 2 of softmaxes of linear maps, under nothing."""
    merging, composing = 0.0, 0.0
    for _ in range(FAMILIES):
        maps, masks = linear_family(generator)
        inputs_BI = torch.randn(8, maps.shape[-1], generator=generator, dtype=torch.float64)
        merging = max(merging, linear_merging(maps, masks, inputs_BI))
        anything = maps + torch.randn(maps.shape, generator=generator, dtype=torch.float64)
        composing = max(composing, softmax_difference(anything, inputs_BI))
    where = f"(largest error, {FAMILIES} families)"
    yield Claim(
        "linear",
        f"Def. 5: merged maps are the experts on their coordinates {where}",
        merging,
        "≤ 1e-10",
        merging <= EXACT,
    )
    yield Claim(
        "linear-softmax",
        f"softmax of linear maps, no hypothesis: Eq. 2 of the outputs is Eq. 5 of the weights {where}",
        composing,
        "≤ 1e-10",
        composing <= EXACT,
    )


def softmax_difference(maps_M: Tensor, inputs_BI: Tensor) -> float:
    """Eq. 2 of softmax(W_m x) against softmax(Ŵ x) with Ŵ of Eq. 5: logits add in both."""
    logp_MBO = torch.einsum("moi,bi->mbo", maps_M, inputs_BI).log_softmax(-1)
    merged_BO = (inputs_BI @ merge_linear(maps_M).T).log_softmax(-1)
    return float((product(logp_MBO) - merged_BO).abs().max())


@dataclass(frozen=True)
class Outputs:
    """Log-probabilities of every model along the same strings, first LAG positions left out; and who should act."""

    members_MBTV: Tensor
    merged_BTV: Tensor
    ideal_BTV: Tensor
    owner_BT: Tensor
    wanted_BT: Tensor

    @property
    def composed_BTV(self) -> Tensor:
        return product(self.members_MBTV)


@torch.no_grad()
def outputs(base: Params, experts: Params, k: int, strings_BT: Tensor) -> Outputs:
    """The ideal is the owner's law where one of k experts owns the letter, the base's elsewhere."""
    rows = [base, *(select(experts, [i]) for i in range(k)), merged(base, experts, range(k))]
    laws = [forward(params, SHAPE, strings_BT[None])[0].log_softmax(-1)[:, LAG:] for params in rows]
    members_MBTV, letter_BT = torch.stack(laws[:-1]), before(strings_BT)[:, LAG:]
    owner_BT, wanted_BT = torch.zeros_like(letter_BT), letter_BT
    for expert, table_V in enumerate(tables(PAIRS[:k]), 1):
        acts_BT = table_V[letter_BT] != letter_BT
        owner_BT = torch.where(acts_BT, expert, owner_BT)
        wanted_BT = torch.where(acts_BT, table_V[letter_BT], wanted_BT)
    index = owner_BT[None, ..., None].expand(1, -1, -1, members_MBTV.shape[-1])
    return Outputs(members_MBTV, laws[-1], members_MBTV.gather(0, index)[0], owner_BT, wanted_BT)


def measure(base: Params, experts: Params, k: int, count: int, generator: torch.Generator) -> dict[str, Any]:
    """Everything about k experts of one age."""
    found = outputs(base, experts, k, strings(count, generator))
    experts_KBTV, base_BTV = found.members_MBTV[1:], found.members_MBTV[0]
    distance_KBT = 0.5 * (experts_KBTV.exp() - base_BTV.exp()).abs().sum(-1)
    ratio_KBT = (experts_KBTV - base_BTV).abs().amax(-1)
    log_z = product_scores(found.members_MBTV).logsumexp(-1).abs()
    return {
        "composed": _strings_right(found.composed_BTV, found.wanted_BT),
        "merged": _strings_right(found.merged_BTV, found.wanted_BT),
        "ideal": _strings_right(found.ideal_BTV, found.wanted_BT),
        "merged against composed": _distance(found.merged_BTV, found.composed_BTV),
        "disentanglement error": _distance(found.merged_BTV, found.ideal_BTV),
        "composed against ideal": _distance(found.composed_BTV, found.ideal_BTV),
        "definition 4, total variation": float(second_largest(distance_KBT)[0].mean()),
        "definition 4, nats": float(second_largest(ratio_KBT)[0].mean()),
        "mean |log Z|": float(log_z.mean()),
    }


def _strings_right(logp_BTV: Tensor, wanted_BT: Tensor) -> float:
    return float((logp_BTV.argmax(-1) == wanted_BT).all(1).float().mean())


def _distance(logp_BTV: Tensor, logq_BTV: Tensor) -> float:
    return task_arithmetic_violation(logp_BTV, logq_BTV)


def first_order(base: Params, experts: Params, count: int, generator: torch.Generator) -> list[dict[str, float]]:
    """Task vectors shrunk to α of their length: merged against composed must fall as α²."""
    strings_BT, table = strings(count, generator), []
    for scale in SCALES:
        shrunk = {name: base[name] + scale * (experts[name] - base[name]) for name in base}
        found = outputs(base, shrunk, 2, strings_BT)
        table.append({"scale": scale, "merged against composed": _distance(found.merged_BTV, found.composed_BTV)})
    return table


def trained_claims(table: Sequence[dict[str, Any]], scaled: Sequence[dict[str, float]]) -> list[Claim]:
    ends = (scaled[0], scaled[-1])
    rise = math.log(ends[1]["merged against composed"] / ends[0]["merged against composed"])
    slope = rise / math.log(ends[1]["scale"] / ends[0]["scale"])
    best = {
        (k, who): max(r[who] for r in table if r["experts"] == k) for k in EXPERTS for who in ("composed", "merged")
    }
    last = {k: next(r for r in reversed(table) if r["experts"] == k) for k in EXPERTS}
    few, many = EXPERTS[0], EXPERTS[-1]
    end = {key: round(last[many][key], 4) for key in last[many] if key not in ("age", "experts")}
    both = min(best[few, "composed"], best[few, "merged"])
    return [
        Claim(
            "first-order",
            "task vectors scaled by α: merged against composed falls as α^s; s",
            round(slope, 3),
            "≥ 1.8",
            slope >= 1.8,
        ),
        Claim("few", f"{few} experts: both get strings right, at their best age", both, "≥ .99", both >= 0.99),
        Claim(
            "many-composed",
            f"{many} experts: composed, at its best age",
            best[many, "composed"],
            "≥ .99",
            best[many, "composed"] >= 0.99,
        ),
        Claim("many-merged", f"{many} experts: merged, at its best age", best[many, "merged"]),
        Claim("many-end", f"{many} experts, after all of fine-tuning", end),
    ]
