"""`reproduce bridge`: one model trained on a growing share of combinations against experts that saw none, composed.

Both have the same shape and the same training compute: a single model's updates see as many rows as the base's and all
experts' together. The share of held-out combinations that come out wholly right is drawn against the share of
combinations that the single model trained on; the experts' composition is a line, since they train on none.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tessellm.files import going_on

from ..common.claims import Claim, Result
from ..common.correlation import correlation
from ..common.devices import checked
from ..common.finite import check_copies
from ..common.folders import state_folder
from ..common.intervals import share
from ..common.panels import COLOURS, caption, drawn, panels, save
from ..common.stacked import Params, Shape, initialise, logits, select, train
from ..skills import chains
from ..skills.experiment import default_rule
from ..skills.members import Recipe, gold_rows, oracle, train_members, wrong
from .combinations import ChainTable, Split, gold, split
from .knowledge import ROWS, Read, decode_all, read
from .state import Cells, State

HELD_OUT = 0.25
Log = Callable[[str], None]


@dataclass(frozen=True)
class Size:
    """How much is trained, and on what."""

    recipe: Recipe
    shares: tuple[float, ...]
    seeds: int
    rows: int  # a length's test texts
    device: str
    model_rows: int  # an update of the single models
    first_minutes: float = float("inf")  # experts that took longer leave the single models for the next call
    workers: int = 1  # processes that decode

    @property
    def model_updates(self) -> int:
        """Updates of a single model that see as many rows as the base and all experts do."""
        recipe = self.recipe
        experts = len(recipe.skills) * recipe.expert_updates * recipe.expert_rows
        return (recipe.base_updates * recipe.base_rows + experts) // self.model_rows


def size_of(name: str) -> Size:
    if name == "cpu":
        recipe = Recipe(
            Shape(chains.VOCABULARY, 64, 2, 2), regimes=("aligned",), skills=(1, 2, 4, 6), steps=2,
            base_updates=400, base_rows=32, base_rate=3e-3, expert_updates=1000, expert_rows=24, expert_rate=2e-3,
        )  # fmt: skip
        return Size(recipe, (0.0, 0.25, 0.5, 0.75), 1, 240, "cpu", 32)
    recipe = Recipe(
        Shape(chains.VOCABULARY, 256, 4, 4), regimes=("aligned", "clean"), steps=3, dtype=torch.bfloat16, compiled=True
    )
    return Size(recipe, (0.0, 0.1, 0.25, 0.5, 0.75), 3, 1024, "cuda", 256, first_minutes=5, workers=os.cpu_count() or 1)


def lengths_of(size: Size) -> range:
    return range(2, size.recipe.steps + 1)


def score_experts(size: Size, seeds: list[int], splits: list[Split], state: State, log: Log) -> None:
    """The composition of all experts on held-out combinations, by seed, regime and length; what its members' layers
    hold is read for `know`."""
    members = train_members(size.recipe, seeds, size.device, log)
    cells: Cells = []
    features: dict[str, Tensor] = {}
    for number, seed in enumerate(seeds):
        for regime in size.recipe.regimes:
            params = members.of(regime, number)
            for length in lengths_of(size):
                generator = torch.Generator(device=size.device).manual_seed(31 * seed + length)
                held = [chain for chain in splits[number].held_out if len(chain) == length]
                prompts = gold(held, size.recipe.skills, size.rows, generator)
                rows = gold_rows(params, size.recipe, prompts)
                right_B = ~wrong(default_rule(rows, prompts.tokens_BT), prompts).any(1)
                best_B = ~wrong(oracle(rows, prompts), prompts).any(1)
                cells.append(
                    {"seed": seed, "regime": regime, "length": length, "composed": share(int(right_B.sum()), size.rows),
                     "oracle": share(int(best_B.sum()), size.rows),
                     "by_chain": {str(c): right_B[n :: len(held)].float().mean().item() for n, c in enumerate(held)}}
                )  # fmt: skip
            name = f"experts.{seed}.{regime}"
            pairs, found = pairs_of(size, params, splits[number], 97 * seed, name)
            cells[-1] |= {"pairs": pairs, "read": name}
            features |= found.named(name)
            log(f"seed {seed}, {regime}: composed {cells[-1]['composed']['share']:.2f} of length {cells[-1]['length']}")
    state.add("experts", cells, features)


def pairs_of(size: Size, params: Params, parts: Split, seed: int, name: str) -> tuple[Cells, Read]:
    """Every pair of skills, none of which an expert ever saw: share composed right; and the experts' layers on them."""
    skills = size.recipe.skills
    every = [chain for chain in (*parts.held_out, *parts.trainable) if len(chain) == 2]
    prompts = gold(every, skills, max(ROWS, 8 * len(every)), torch.Generator(device=size.device).manual_seed(seed))
    rows = gold_rows(params, size.recipe, prompts)
    right_B = ~wrong(default_rule(rows, prompts.tokens_BT), prompts).any(1)
    pairs = [
        {"pair": list(chain), "right": right_B[n :: len(every)].float().mean().item()} for n, chain in enumerate(every)
    ]
    return pairs, read(select(params, list(range(1, 1 + len(skills)))), size.recipe.shape, prompts, name)


def score_models(size: Size, seeds: list[int], splits: list[Split], state: State, log: Log) -> None:
    """Single models on the same held-out combinations, by seed, share trained on and length."""
    generator = torch.Generator(device=size.device).manual_seed(1000 + seeds[0])
    seen = [splits[number].seen(part) for number in range(len(seeds)) for part in size.shares]
    table = ChainTable(seen, size.recipe.skills, size.recipe.steps, size.device)
    params = train(
        initialise(size.recipe.shape, len(seen), generator), size.recipe.shape,
        lambda: table.batch(size.model_rows, generator), size.model_updates, size.recipe.base_rate,
        lambda step, loss: log(f"single models, update {step + 1}: mean loss {loss.mean():.2g}"),
        compiled=size.recipe.compiled, dtype=size.recipe.dtype,
    )  # fmt: skip
    cells: Cells = []
    features: dict[str, Tensor] = {}
    for index in range(len(seen)):
        number, part = divmod(index, len(size.shares))
        for length in lengths_of(size):
            cells.append(_score_model(size, params, index, seeds[number], splits[number], length))
            cells[-1] |= {"share": size.shares[part], "combinations": len(seen[index])}
        every = [chain for chain in (*splits[number].held_out, *splits[number].trainable) if len(chain) == 2]
        prompts = gold(every, size.recipe.skills, ROWS, torch.Generator(device=size.device).manual_seed(97))
        name = f"models.{index}"
        features |= read(select(params, [index]), size.recipe.shape, prompts, name).named(name)
        cells[-1]["read"] = name
        log(f"seed {seeds[number]}, share {size.shares[part]}: {cells[-1]['right']['share']:.2f}")
    state.add("models", cells, features)


def know(size: Size, state: State, log: Log) -> None:
    """Decodability wherever layers were read: of every expert's turn, of the single models' next skill."""
    waiting = [(kind, cell) for kind, cells in state.cells.items() for cell in cells if "read" in cell]
    jobs = []
    for kind, cell in waiting:
        found = state.read(cell["read"])
        x_END, due_N, groups_N = found.x_END.float().numpy(), found.due_N.numpy(), found.groups_N.numpy()
        jobs += [(x_ND, due_N, groups_N, 1 + k if kind == "experts" else None) for k, x_ND in enumerate(x_END)]
    if jobs:
        log(f"decoding from the layers of {len(jobs)} models")
    scores = decode_all(jobs, size.workers)
    skills = size.recipe.skills
    for kind, cell in waiting:
        if kind == "models":
            cell["decodability"] = next(scores)
        else:
            cell["decodability"] = [next(scores) for _ in skills]
            for pair in cell["pairs"]:
                pair["knows"] = min(cell["decodability"][skills.index(skill)]["score"] for skill in pair["pair"])
        del cell["read"]
        state.write()
    state.forget_features()


@torch.no_grad()
def _score_model(size: Size, params: Params, index: int, seed: int, parts: Split, length: int) -> dict[str, Any]:
    generator = torch.Generator(device=size.device).manual_seed(31 * seed + length)
    prompts = gold([c for c in parts.held_out if len(c) == length], size.recipe.skills, size.rows, generator)
    logp = logits(select(params, [index]), size.recipe.shape, prompts.tokens_BT[None])[0]
    right = int((~wrong(logp, prompts).any(1)).sum())
    return {"seed": seed, "length": length, "right": share(right, size.rows)}


def run(seed: int, out: Path, size: str, log: Log = print) -> Result:
    """Train and measure both; `bridge.json` and `bridge.png`. At full size what is done is kept in between."""
    began = time.monotonic()
    setting = size_of(size)
    seeds = [seed + number for number in range(setting.seeds)]
    splits = [split(setting.recipe.skills, setting.recipe.steps, HELD_OUT, s) for s in seeds]
    state = State(out / "bridge-state" if size == "full" else None, seeds)
    if len(state.cells) < 2:
        check_copies(checked(setting.device))
        if state.folder is not None:
            state_folder(state.folder)
    with going_on(state.folder):
        if "experts" not in state.cells:
            score_experts(setting, seeds, splits, state, log)
        if "models" not in state.cells and time.monotonic() - began < 60 * setting.first_minutes:
            score_models(setting, seeds, splits, state, log)
        elif "models" not in state.cells:
            log("the single models are left for the next call: run the same command again")
        know(setting, state, log)
    experts, models = state.cells["experts"], state.cells.get("models", [])
    claims = [Claim("finished", "single models trained too", bool(models), "true", bool(models))]
    claims += claims_of(experts, models) if models else []
    figures = drawn(lambda: draw(experts, models, out)) if models else []
    tables = {"experts": experts, "models": models, "updates": {"single": setting.model_updates}}
    state.write()
    return Result("bridge", claims, seed, size, state.stopwatch.seconds, figures, tables)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def composed_at(experts: list[dict[str, Any]], length: int, regime: str) -> float:
    return mean([c["composed"]["share"] for c in experts if c["length"] == length and c["regime"] == regime])


def curve(models: list[dict[str, Any]], length: int) -> list[tuple[float, float]]:
    """Share of combinations trained on, and the mean share of held-out ones right."""
    parts = sorted({c["share"] for c in models})
    return [
        (s, mean([c["right"]["share"] for c in models if c["share"] == s and c["length"] == length])) for s in parts
    ]


def crossing(points: list[tuple[float, float]], level: float) -> float | None:
    """The share at which the single model reaches the level, between points in a straight line; None: never."""
    if points[0][1] >= level:
        return points[0][0]
    for (x0, y0), (x1, y1) in pairwise(points):
        if y1 >= level:
            return round(x0 + (x1 - x0) * (level - y0) / (y1 - y0), 3)
    return None


def claims_of(experts: list[dict[str, Any]], models: list[dict[str, Any]]) -> list[Claim]:
    """Where the curves cross, and what decodability has to do with it. Measurements: the answer is not known before."""
    claims = []
    for length in sorted({c["length"] for c in models}):
        points = curve(models, length)
        shown = ", ".join(f"{s:g}: {right:.3f}" for s, right in points)
        claims.append(Claim(f"single-{length}", f"chains of {length}: held-out right by share trained on", shown))
        for regime in sorted({c["regime"] for c in experts}):
            level = composed_at(experts, length, regime)
            text = f"chains of {length}, {regime} experts composed: held-out combinations right"
            claims.append(Claim(f"composed-{regime}-{length}", text, round(level, 4)))
            at = crossing(points, level)
            text = f"chains of {length}: share of combinations at which one model draws level ({regime} experts)"
            claims.append(Claim(f"crossing-{regime}-{length}", text, "never" if at is None else at))
    for length in sorted({c["length"] for c in models}):
        text = f"held-out chains of {length} right and decodability of the skill that is due in chains of 2"
        claims += _correlated(f"decodability-models-{length}", "single models", by_model(models, length), text)
    text = "composed right and the weaker expert's decodability"
    claims += _correlated("decodability-experts", "pairs of experts", by_pair(experts), text)
    for regime in sorted({c["regime"] for c in experts}):
        own = by_pair([c for c in experts if c["regime"] == regime])
        claims += _correlated(f"decodability-experts-{regime}", f"pairs of {regime} experts", own, text)
    return claims


def _correlated(name: str, whose: str, points: list[tuple[float, float]], text: str) -> list[Claim]:
    """The correlation over points with its interval, where there is one."""
    if len(points) < 4 or any(len(set(values)) == 1 for values in zip(*points, strict=True)):
        return []
    found = correlation([right for right, _ in points], [known for _, known in points])
    value = [round(found[k], 3) for k in ("pearson", "low", "high")]
    return [Claim(name, f"{len(points)} {whose}: correlation of {text}", value)]


def by_model(models: list[dict[str, Any]], length: int) -> list[tuple[float, float]]:
    """For every single model: share of held-out chains of a length right, and how well its layers tell what is due."""
    known = {(c["seed"], c["share"]): c["decodability"]["score"] for c in models if "decodability" in c}
    return [(c["right"]["share"], known[c["seed"], c["share"]]) for c in models if c["length"] == length]


def by_pair(experts: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """For every pair of skills: share composed right, and how well the weaker of both experts knows its turn."""
    return [(pair["right"], pair["knows"]) for cell in experts for pair in cell.get("pairs", [])]


def draw(experts: list[dict[str, Any]], models: list[dict[str, Any]], out: Path) -> str:
    lengths = sorted({c["length"] for c in models})
    figure, axes = panels(len(lengths) + 1)
    colours = dict(zip(sorted({c["regime"] for c in experts}), (COLOURS[0], COLOURS[2]), strict=False))
    for ax, length in zip(axes, lengths, strict=False):
        cells = [c for c in models if c["length"] == length]
        ax.scatter([c["share"] for c in cells], [c["right"]["share"] for c in cells], s=14, color=COLOURS[1], alpha=0.6)
        ax.plot(*zip(*curve(models, length), strict=True), color=COLOURS[1], label="one model")
        for regime, colour in colours.items():
            shares = [c["composed"]["share"] for c in experts if c["length"] == length and c["regime"] == regime]
            ax.axhline(mean(shares), color=colour, label=f"composed experts ({regime})")
            ax.axhspan(min(shares), max(shares), color=colour, alpha=0.12)
        ax.set_ylim(-0.02, 1.02)
        caption(ax, f"Chains of {length}", "share of combinations trained on", "held-out combinations right")
    axes[0].legend(fontsize=7, loc="upper left", bbox_to_anchor=(0, 0.96))  # curves begin below
    known = by_model(models, lengths[0])
    axes[-1].scatter([k for _, k in known], [r for r, _ in known], color=COLOURS[1], label="one model")
    for regime, colour in colours.items():
        right, knows = zip(*by_pair([c for c in experts if c["regime"] == regime]), strict=True)
        axes[-1].scatter(knows, right, s=12, color=colour, alpha=0.6, label=f"pair of experts ({regime})")
    axes[-1].legend(fontsize=7)
    caption(axes[-1], "What the layers know", "decodability of whose turn it is", "chains of 2 right")
    return save(figure, out, "bridge")
