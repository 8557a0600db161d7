"""`reproduce images`: do layers in which the constituents are not decodable announce pictures that fail?

Models that trained on fewer combinations of shape, colour and place; a judge that names the nearest template; a probe
for each constituent on the last hidden layer half-way through sampling. Two forms of it, each with the same number of
combinations and rows for every model: fitted on trained combinations and asked about held-out ones (`read`), and fitted
on some held-out combinations and asked about others (`read_across`). Controls: shuffled labels, random weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..common.claims import Claim, Result
from ..common.correlation import correlation, spearman
from ..common.devices import checked
from ..common.panels import COLOURS, caption, drawn, panels, save
from ..probe.decoders import logistic
from . import scenes
from .flow import Flow

HELD_OUT = (0.25, 0.5, 0.75, 0.9)
PROBE_COMBINATIONS, PROBE_SAMPLES, PENALTY = 14, 16, 0.01
ACROSS, FOLDS = 36, 4  # held-out combinations that every model has, and the parts they are split into
Log = Callable[[str], None]


@dataclass(frozen=True)
class Size:
    flows: tuple[Flow, ...]
    seeds: int
    samples: int  # pictures a combination
    device: str


SIZES = {
    "cpu": Size((Flow(),), 3, 8, "cpu"),
    "full": Size((Flow(64, updates=5000), Flow(256, updates=5000), Flow(1024, updates=5000)), 3, 16, "cuda"),
}


def split(held_out: float, seed: int) -> tuple[Tensor, Tensor]:
    """Combinations to train on and held out, by row number; the first ones to train on hold every value of every
    constituent, so that no model lacks a part and every probe can be fitted."""
    every, generator = scenes.combinations(), torch.Generator().manual_seed(seed)
    for _ in range(10_000):
        order = torch.randperm(len(every), generator=generator)
        first = every[order[:PROBE_COMBINATIONS]]
        if all(len(first[:, n].unique()) == size for n, size in enumerate(scenes.SIZES)):
            count = len(every) - int(held_out * len(every))
            return order[:count], order[count:]
    raise AssertionError("fourteen combinations hold all values often enough")


def probe(fit_ND: Tensor, fit_on_N: Tensor, test_ND: Tensor, test_on_N: Tensor, shuffle: int | None = None) -> Tensor:
    """Whether each constituent of each test row is read right, by decoders fitted on the other rows: [3, N]."""
    mean_D, std_D = fit_ND.mean(0), fit_ND.std(0).clamp(min=1e-6)
    x, test = ((rows - mean_D).double() / std_D for rows in (fit_ND, test_ND))
    parts = scenes.combinations().to(fit_on_N.device)
    labels_JN = parts[fit_on_N].T.contiguous()
    if shuffle is not None:
        order = torch.randperm(labels_JN.shape[1], generator=torch.Generator().manual_seed(shuffle))
        labels_JN = labels_JN[:, order.to(labels_JN.device)]
    start = x.new_zeros(len(labels_JN), x.shape[1] + 1, max(scenes.SIZES))
    penalty_J = x.new_full((len(labels_JN),), PENALTY)
    w_JDC = logistic(x, labels_JN, torch.ones_like(labels_JN, dtype=x.dtype), start, penalty_J)
    logits_JNC = torch.einsum("nd,jdc->jnc", test, w_JDC[:, :-1]) + w_JDC[:, -1:]
    return logits_JNC.argmax(-1) == parts[test_on_N].T


def probe_across(hidden_ND: Tensor, on_N: Tensor, held: Tensor) -> float:
    """Share of constituents read right in held-out combinations, by decoders fitted on other held-out ones."""
    chosen = held[:ACROSS].to(on_N.device)
    right = []
    for fold in range(FOLDS):
        test_N = torch.isin(on_N, chosen[fold::FOLDS])
        fit_N = torch.isin(on_N, chosen) & ~test_N
        right.append(probe(hidden_ND[fit_N], on_N[fit_N], hidden_ND[test_N], on_N[test_N]))
    return torch.cat(right, 1).float().mean().item()


def measure(
    flow: Flow, params: Any, splits: list[tuple[Tensor, Tensor]], size: Size, seed: int
) -> Iterator[dict[str, Any]]:
    """Success of pictures and of probes, a row a model, each as soon as it is there."""
    generator = torch.Generator(device=size.device).manual_seed(seed + 5)
    every = torch.arange(len(scenes.combinations()), device=size.device).repeat(size.samples)
    picture_EBP, hidden_EBD = flow.sample(params, every.expand(len(splits), -1), generator)
    random = {name: value[:1] for name, value in flow.initialise(1, generator).items()}
    for number, (train, held) in enumerate(splits):
        right_B = scenes.judge(picture_EBP[number]) == every
        held_B = torch.isin(every, held.to(size.device))
        fit_on = train[:PROBE_COMBINATIONS].to(size.device).repeat(PROBE_SAMPLES)
        fit, _ = _hidden(flow, {name: value[number : number + 1] for name, value in params.items()}, fit_on, generator)
        random_fit, _ = _hidden(flow, random, fit_on, generator)
        random_test, _ = _hidden(flow, random, every[held_B], generator)
        test, on = hidden_EBD[number][held_B], every[held_B]
        read_JN = probe(fit, fit_on, test, on)
        by_combination = [
            (right_B[held_B][on == c].float().mean().item(), read_JN[:, on == c].float().mean().item())
            for c in held.tolist()
        ]
        yield {
            "trained_right": right_B[~held_B].float().mean().item(), "right": right_B[held_B].float().mean().item(),
            "read": read_JN.float().mean().item(),
            "read_by_constituent": dict(zip(scenes.CONSTITUENTS, read_JN.float().mean(1).tolist(), strict=True)),
            "read_shuffled": probe(fit, fit_on, test, on, shuffle=seed).float().mean().item(),
            "read_random_weights": probe(random_fit, fit_on, random_test, on).float().mean().item(),
            "read_across": probe_across(test, on, held),
            "read_across_random_weights": probe_across(random_test, on, held),
            "combinations": len(train), "by_combination": by_combination,
        }  # fmt: skip


def _hidden(flow: Flow, params: Any, on_B: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    picture, hidden = flow.sample(params, on_B[None], generator)
    return hidden[0], picture[0]


def run(seed: int, out: Path, size: str, log: Log = print) -> Result:
    """Train, draw, judge, probe; `images.json` and `images.png`."""
    began, setting = time.monotonic(), SIZES[size]
    device = checked(setting.device)
    rows: list[dict[str, Any]] = []
    for flow in setting.flows:
        named = [(share, seed + number) for share in HELD_OUT for number in range(setting.seeds)]
        splits = [split(share, own) for share, own in named]
        params = flow.train([train for train, _ in splits], seed, device, log)
        for (share, own), row in zip(named, measure(flow, params, splits, setting, seed), strict=True):
            rows.append({"width": flow.width, "held_out": share, "seed": own, **row})
            log(f"width {flow.width}, {share:.0%} held out: {row['right']:.2f} right, {row['read']:.2f} read off")
    figures = drawn(lambda: draw(rows, out))
    return Result("images", claims_of(rows), seed, size, time.monotonic() - began, figures, {"models": rows})


def claims_of(rows: list[dict[str, Any]]) -> list[Claim]:
    """Measurements: the correlations are reported whatever they are."""
    right = [row["right"] for row in rows]
    found, across = (correlation(right, [row[key] for row in rows]) for key in ("read", "read_across"))
    inside = []
    for row in rows:
        drawn_right, read = zip(*row["by_combination"], strict=True)
        if len(set(drawn_right)) > 1 and len(set(read)) > 1:
            inside.append(spearman(drawn_right, read))
    shares = sorted({row["held_out"] for row in rows})
    at = {share: [row for row in rows if row["held_out"] == share] for share in shares}

    def by_share(key: str) -> str:
        return ", ".join(f"{s:g}: {sum(r[key] for r in at[s]) / len(at[s]):.2f}" for s in shares)

    trained = min(row["trained_right"] for row in rows)
    text = f"correlation of held-out pictures right and constituents read off, {len(rows)} models"
    interval, interval_across = (
        [round(each[key], 3) for key in ("pearson", "low", "high")] for each in (found, across)
    )
    between = [round(min(inside), 3), round(max(inside), 3)] if inside else None
    return [
        Claim("models", "models compared", len(rows), "≥ 12", len(rows) >= 12),
        Claim("trained", "trained combinations: worst model's share of pictures right", round(trained, 4)),
        Claim("right", "held-out pictures right, by share of combinations held out", by_share("right")),
        Claim("read", "constituents read off held-out ones, by share held out", by_share("read")),
        Claim("shuffled", "the same with shuffled labels", by_share("read_shuffled")),
        Claim("random-weights", "the same with random weights", by_share("read_random_weights")),
        Claim("correlation", f"{text}, with its 95 % interval", interval),
        Claim("across", "read off held-out ones by decoders of other held-out ones, by share", by_share("read_across")),
        Claim("across-random", "the same with random weights", by_share("read_across_random_weights")),
        Claim("correlation-across", "correlation of pictures right with that, with its interval", interval_across),
        Claim("within", "the same within a model, combination by combination (Spearman): least and most", between),
        *width_claims(rows),
    ]


def width_claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """Wider networks draw more pictures right and are read more readily, so widths are told apart."""
    made = []
    for width in sorted({row["width"] for row in rows}):
        some = [row for row in rows if row["width"] == width]
        found = correlation([row["right"] for row in some], [row["read_across"] for row in some])
        text = f"correlation of pictures right and read across, the {len(some)} models of width {width}"
        made.append(Claim(f"across-{width}", text, [round(found[key], 3) for key in ("pearson", "low", "high")]))
    return made


def draw(rows: list[dict[str, Any]], out: Path) -> str:
    """A colour a width."""
    figure, (left, right) = panels(2, width=5.2, height=4.4)
    lines = {"right": ("right", "-"), "read": ("read off", "--"), "read_across": ("read off, across", ":")}
    for number, width in enumerate(sorted({row["width"] for row in rows})):
        colour, chosen = COLOURS[number], [row for row in rows if row["width"] == width]
        shares = sorted({row["held_out"] for row in chosen})
        for key, (word, style) in lines.items():
            at = [[row[key] for row in chosen if row["held_out"] == share] for share in shares]
            means = [sum(some) / len(some) for some in at]
            left.plot(shares, means, "o" + style, color=colour, label=f"{word}, {width} wide", markersize=4)
        y = [row["right"] for row in chosen]
        right.scatter([row["read"] for row in chosen], y, color=colour, label=f"from trained, {width} wide")
        hollow = {"facecolors": "none", "edgecolors": colour, "label": f"across held-out, {width} wide"}
        right.scatter([row["read_across"] for row in chosen], y, **hollow)
    caption(left, "Held-out pictures", "share of combinations held out", "share")
    caption(right, "One dot a model", "constituents read off the last hidden layer", "held-out pictures right")
    for ax in (left, right):  # under the panel: there is no corner that stays empty
        place = {"loc": "upper center", "bbox_to_anchor": (0.45, -0.16), "ncols": 3}
        ax.legend(fontsize=6.5, frameon=False, columnspacing=1.0, handlelength=3.2, **place)
    return save(figure, out, "images")
