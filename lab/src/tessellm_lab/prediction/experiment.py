"""Does the diagnosis on unlabelled prompts predict how often a composition is right?

Some hundred compositions, of well- and under-trained members, with compatible and rival experts, in regimes in which
the theory holds and in which it does not, under Eq. 2 and under the default rule. For each: the predicted share of
right texts, from what the diagnosis sees on prompts without answers, and the measured share on other prompts. The
naive predictor beside it is the experts' mean divergence from the base. The score was frozen before any seed
from 100 on was made.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tessellm.diagnose.score import chance_right
from tessellm.files import write_figure

from ..common.claims import Claim, Result
from ..common.correlation import spearman
from ..common.devices import device_for
from . import letters, skills, trig
from .compositions import Judged

Benchmark = Callable[[int, str, str, Callable[[str], None]], Iterator[Judged]]
BENCHMARKS: dict[str, Benchmark] = {"letters": letters.judged, "skills": skills.judged, "trig": trig.judged}
RESAMPLES = 2000


def interval(rows: Sequence[Mapping[str, Any]], name: str, seed: int) -> tuple[float, float]:
    """Of the rank correlation: a bootstrap over groups of compositions that share their trained members."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["members"], []).append(row)
    every = list(groups.values())
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(RESAMPLES):
        drawn = torch.randint(len(every), (len(every),), generator=generator).tolist()
        some = [row for group in drawn for row in every[group]]
        found.append(spearman([row[name] for row in some], [row["measured"] for row in some]))
    low, high = torch.tensor(found, dtype=torch.float64).quantile(torch.tensor([0.025, 0.975]).double()).tolist()
    return low, high


def row_of(judged: Judged, seed: int) -> dict[str, Any]:
    about = judged.description
    made = f"{about['updates']} updates" if "updates" in about else f"strength {about['strength']:g}"
    members = f"{judged.benchmark} {seed}, {made}, {about.get('regime', '')}"
    return {
        "benchmark": judged.benchmark,
        "seed": seed,
        "members": members,
        **about,
        "predicted": float(chance_right(judged.rows).mean()),
        "mean KL": float(judged.rows["divergence"].mean()),
        "measured": judged.accuracy,
    }


def claims_of(every: Sequence[Mapping[str, Any]], seed: int) -> list[Claim]:
    """Of the compositions that know together what they are asked; and what is predicted of those that do not."""
    rows = [row for row in every if not row.get("missing")]
    measured = [row["measured"] for row in rows]
    value = spearman([row["predicted"] for row in rows], measured)
    low, high = (round(each, 4) for each in interval(rows, "predicted", seed))
    naive = spearman([-row["mean KL"] for row in rows], measured)
    error = sum(abs(row["predicted"] - row["measured"]) for row in rows) / len(rows)
    judged = "rank correlation of predicted and measured share of right texts"
    claims = [
        Claim("spearman", judged, round(value, 4), "≥ 0.8", value >= 0.8),
        Claim("interval", f"{judged}: 95 % interval", [low, high]),
        Claim("naive", "the same for less mean KL", round(naive, 4)),
        Claim("error", "mean absolute difference of predicted and measured share", round(error, 4)),
        Claim("compositions", "compositions judged", len(rows), "≥ 60", len(rows) >= 60),
    ]
    for key in ("benchmark", "rule"):
        for kind in sorted({row[key] for row in rows}):
            some = [row for row in rows if row[key] == kind]
            found = spearman([row["predicted"] for row in some], [row["measured"] for row in some])
            claims.append(Claim(f"{key} {kind}", f"{judged}, {kind} alone ({len(some)})", round(found, 4)))
    blind = [row for row in every if row.get("missing")]
    if blind:
        means = [round(sum(row[name] for row in blind) / len(blind), 4) for name in ("predicted", "measured")]
        statement = f"what no trace shows: mean share predicted and measured where no expert knows how ({len(blind)})"
        claims.append(Claim("blind", statement, means))
    return claims


def run(seed: int, out: Path, size: str, log: Callable[[str], None] = print) -> dict[str, Any]:
    """Train, judge, write `prediction.json` and `prediction.png`."""
    began = time.monotonic()
    device = device_for(size)
    torch.set_float32_matmul_precision("highest")
    rows = []
    for each in range(seed, seed + (3 if size == "full" else 1)):
        for name, judge in BENCHMARKS.items():
            rows += [row_of(judged, each) for judged in judge(each, size, device, log)]
            log(f"seed {each}, {name}: {len(rows)} compositions")
    result = Result(
        "prediction", claims_of(rows, seed), seed, size, time.monotonic() - began, ("prediction.png",),
        {"compositions": rows},
    )  # fmt: skip
    content = result.write(out)
    draw(content, out)
    return content


def draw(content: dict[str, Any], out: Path) -> None:
    """Predicted and naive against measured."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    rows = [row for row in content["tables"]["compositions"] if not row.get("missing")]
    by_id = {claim["id"]: claim["value"] for claim in content["claims"]}
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    marks = {"letters": "o", "skills": "s", "trig": "^"}
    for rule, shade in (("product", "C3"), ("evidence", "C0")):
        for benchmark in sorted({row["benchmark"] for row in rows}):
            some = [row for row in rows if (row["rule"], row["benchmark"]) == (rule, benchmark)]
            for axis, name in ((left, "predicted"), (right, "mean KL")):
                axis.plot(
                    [row[name] for row in some], [row["measured"] for row in some], marks[benchmark],
                    color=shade, markersize=4, alpha=0.6, label=f"{benchmark}, {rule}",
                )  # fmt: skip
    left.plot([0, 1], [0, 1], color="0.6", linewidth=1)
    left.set(xlabel="predicted share of right texts, without answers", ylabel="measured share")
    left.set_title(f"Diagnosis: rank correlation {by_id['spearman']:.2f}", fontsize=10)
    right.set(xlabel="mean KL of the experts from the base (nats)", xscale="symlog")
    right.set_title(f"Naive: {by_id['naive']:.2f}", fontsize=10)
    left.legend(fontsize=7)
    figure.suptitle(f"{len(rows)} compositions ({content['hardware']}; seed {content['seed']})", fontsize=9)
    write_figure(figure, out / "prediction.png", dpi=120)
