"""Skill chains with two to eight experts: which rule lets the right expert speak at the right time?

Small transformers (see `members`) in four regimes, chains of one to four skills, exact match of the whole
greedy output. An oracle (the true owner speaks) says what is possible in each cell. Beside the default rule: Eq. 2,
other weightings and gates, an earlier hand-over rule, and merging of the same checkpoints.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..common.claims import Claim, Result
from ..common.devices import device_for
from ..common.gates import GATES
from ..common.intervals import share
from ..common.panels import blank, drawn, save
from ..common.stacked import Shape, logits, select
from ..evidence import Evidence
from . import baselines, chains
from .chains import Prompts
from .members import Members, Recipe, first_errors, gold_rows, oracle, train_members, wrong
from .novelty import novelty_rule

Table = list[dict[str, Any]]
MERGE_SCALES = (0.5, 1.0)
MERGE_SUBSETS = 2


def default_rule(logp_MBTV: Tensor, tokens_BT: Tensor) -> Tensor:
    return Evidence()(logp_MBTV, tokens_BT, torch.ones_like(tokens_BT, dtype=torch.bool), None)[0]


def rules() -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Every decoding rule of the comparison, as a function of rows and tokens."""
    stateless = baselines.DECODING | GATES
    table: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        name: lambda logp, tokens, rule=rule: rule(logp)  # type: ignore[misc]
        for name, rule in stateless.items()
    }
    return table | {"novelty": novelty_rule, "evidence": default_rule}


def recipes(size: str) -> dict[str, Recipe]:
    """Which members are trained: for anyone in minutes, or in full on a GPU."""
    if size == "cpu":
        shape = Shape(chains.VOCABULARY, 64, 2, 2)
        quick = Recipe(
            shape, regimes=("aligned", "aware"), skills=(1, 4, 6), steps=2, base_updates=400, base_rows=32,
            base_rate=3e-3, expert_updates=1600, expert_rows=24, expert_rate=2e-3,
        )  # fmt: skip
        return {"2 layers, 64 wide": quick}
    large, small = Shape(chains.VOCABULARY, 256, 4, 4), Shape(chains.VOCABULARY, 128, 2, 4)
    return {
        "4 layers, 256 wide": Recipe(large, dtype=torch.bfloat16, compiled=True),
        "2 layers, 128 wide": Recipe(small, dtype=torch.bfloat16, compiled=True),
    }


def score_cell(params: Any, recipe: Recipe, prompts: Prompts) -> dict[str, Any]:
    """Right sequences of every rule in one cell, and where the default rule first errs."""
    rows = gold_rows(params, recipe, prompts)
    right = {"oracle": int((~wrong(oracle(rows, prompts), prompts).any(1)).sum())}
    for name, rule in rules().items():
        errors = wrong(rule(rows, prompts.tokens_BT), prompts)
        right[name] = int((~errors.any(1)).sum())
    return {"right": right, "first_errors": first_errors(errors, prompts)}


@torch.no_grad()
def score_merges(params: Any, recipe: Recipe, experts: int, chain: int, rows: int, seed: int) -> dict[str, int]:
    """Right sequences of each merging method at its best scale, over a few choices of experts."""
    device = next(iter(params.values())).device
    generator = torch.Generator(device=device).manual_seed(seed)
    right = {(method, scale): 0 for method in baselines.MERGING for scale in (1 / experts, *MERGE_SCALES)}
    for _ in range(MERGE_SUBSETS):
        slots = torch.randperm(len(recipe.skills), generator=generator, device=device)[:experts].tolist()
        skills = tuple(recipe.skills[slot] for slot in slots)
        prompts = chains.sample_test(experts, chain, rows // MERGE_SUBSETS, generator, skills)
        subset = select(params, [0, *(1 + slot for slot in slots)])
        for method, scale in right:
            merged = baselines.merge(method, subset, scale, seed)
            logp = logits(merged, recipe.shape, prompts.tokens_BT[None])[0].log_softmax(-1)
            right[method, scale] += int((~wrong(logp, prompts).any(1)).sum())
    return {method: max(n for (m, _), n in right.items() if m == method) for method in baselines.MERGING}


def measure(members: Members, seeds: list[int], prompts_a_cell: int, log: Callable[[str], None]) -> Table:
    """Every cell: regime, number of experts, length of chain; counts pooled over seeds, and by seed."""
    recipe = members.recipe
    device = next(iter(members.bases.values())).device
    table: Table = []
    counts = sorted({min(k, len(recipe.skills)) for k in (2, 4, 6, 8)})
    for regime in recipe.regimes:
        for experts in counts:
            for chain in range(1, recipe.steps + 1):
                by_seed = []
                for index, seed in enumerate(seeds):
                    generator = torch.Generator(device=device).manual_seed(7919 * seed + 31 * experts + chain)
                    prompts = chains.sample_test(experts, chain, prompts_a_cell, generator, recipe.skills)
                    params = members.of(regime, index)
                    cell = score_cell(params, recipe, prompts)
                    cell["right"] |= score_merges(params, recipe, experts, chain, prompts_a_cell, seed)
                    by_seed.append(cell)
                table.append(pool(regime, experts, chain, prompts_a_cell, by_seed))
            last = table[-1]["rules"]
            log(
                f"{regime}, {experts} experts: "
                + ", ".join(f"{r} {last[r]['share']:.2f}" for r in ("oracle", "eq2", "evidence"))
            )
    return table


def pool(regime: str, experts: int, chain: int, prompts: int, by_seed: list[dict[str, Any]]) -> dict[str, Any]:
    rules_ = {
        name: share(sum(cell["right"][name] for cell in by_seed), prompts * len(by_seed))
        | {"by_seed": [cell["right"][name] / prompts for cell in by_seed]}
        for name in by_seed[0]["right"]
    }
    kinds = by_seed[0]["first_errors"]
    errors = {kind: sum(cell["first_errors"][kind] for cell in by_seed) for kind in kinds}
    return {"regime": regime, "experts": experts, "chain": chain, "rules": rules_, "first_errors": errors}


def worst_ratio(table: Table, regimes: tuple[str, ...], lengths: tuple[int, ...]) -> float:
    """The smallest share of the oracle's sequences that the default rule gets right."""
    cells = [c["rules"] for c in table if c["regime"] in regimes and c["chain"] in lengths]
    return min(c["evidence"]["share"] / max(c["oracle"]["share"], 1e-9) for c in cells)


def claims_of(table: Table, label: str, targets: bool) -> list[Claim]:
    """What the issue set out to show; without targets the same numbers are measurements."""
    present = {cell["regime"] for cell in table}
    easy = tuple(r for r in ("aligned", "aware", "clean") if r in present)
    deficit = max(c["rules"]["eq2"]["share"] - c["rules"]["evidence"]["share"] for c in table)
    wanted = [
        ("chain-1", f"one skill, {', '.join(easy)}: worst share of the oracle", easy, (1,), 0.99),
        ("aligned", "chains 2 and 3, aligned: worst share of the oracle", ("aligned",), (2, 3), 0.97),
        ("aware", "chains 2 and 3, aware: worst share of the oracle", ("aware",), (2, 3), 0.90),
    ]
    claims = []
    for id_, text, regimes, lengths, target in wanted:
        if present.issuperset(regimes):
            value = worst_ratio(table, regimes, lengths)
            goal = (f"≥ {target}", value >= target) if targets else (None, None)
            claims.append(Claim(f"{id_} ({label})", f"{label}: {text}", round(value, 4), *goal))
    holds = deficit <= 0.02 if targets else None
    text = f"{label}: the most that Eq. 2 is ahead of the default rule in any cell"
    return [*claims, Claim(f"eq2 ({label})", text, round(deficit, 4), "≤ 0.02" if targets else None, holds)]


def run(seed: int, out: Path, size: str, log: Callable[[str], None] = print) -> dict[str, Any]:
    """Train, measure, write `skills.json` and `skills.png`."""
    began = time.monotonic()
    device = device_for(size)
    seeds = [seed, seed + 1, seed + 2] if size == "full" else [seed]
    torch.set_float32_matmul_precision("highest")
    tables: dict[str, Table] = {}
    claims: list[Claim] = []
    for index, (label, recipe) in enumerate(recipes(size).items()):
        members = train_members(recipe, seeds, device, lambda text, label=label: log(f"{label}: {text}"))  # type: ignore[misc]
        tables[label] = measure(members, seeds, 512 if size == "full" else 128, log)
        claims += claims_of(tables[label], label, targets=size == "full" and index == 0)
        content = Result("skills", claims, seed, size, time.monotonic() - began, tables=tables).write(out)
    figures = drawn(lambda: draw(content, out))
    return Result("skills", claims, seed, size, time.monotonic() - began, figures, tables).write(out)


def draw(content: dict[str, Any], out: Path) -> str:
    """One panel a regime and chain: share of right sequences by number of experts."""
    label, table = next(iter(content["tables"].items()))
    regimes = [r for r in chains.REGIMES if any(c["regime"] == r for c in table)]
    lengths = sorted({c["chain"] for c in table})
    merges = list(baselines.MERGING)
    figure = blank(3 * len(lengths), 2.4 * len(regimes), layout="constrained")
    axes = figure.subplots(len(regimes), len(lengths), sharex=True, sharey=True, squeeze=False)
    styles = {"oracle": "k:", "evidence": "C0o-", "novelty": "C2^--", "owner": "C1s--", "eq2": "C3x-"}
    for row, regime in enumerate(regimes):
        for column, chain in enumerate(lengths):
            cells = [c for c in table if c["regime"] == regime and c["chain"] == chain]
            counts = [c["experts"] for c in cells]
            axis = axes[row][column]
            for name, style in styles.items():
                values = [c["rules"][name] for c in cells]
                axis.plot(counts, [v["share"] for v in values], style, label=name, markersize=4)
                axis.fill_between(
                    counts, [v["low"] for v in values], [v["high"] for v in values], color="0.5", alpha=0.15
                )
            best = [max(c["rules"][m]["share"] for m in merges) for c in cells]
            axis.plot(counts, best, "C4v:", label="best merge", markersize=4)
            axis.set_title(f"{regime}, chain {chain}", fontsize=9)
            axis.set_xticks(counts)
    axes[0][0].legend(fontsize=7)
    figure.supxlabel("experts")
    figure.supylabel("exact match")
    figure.suptitle(f"Skill chains ({label}; {content['hardware']}; seed {content['seed']})", fontsize=10)
    figure.set_dpi(130)
    return save(figure, out, "skills")
