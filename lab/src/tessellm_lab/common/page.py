"""One self-contained HTML page with every claim, its value, its target and its figure."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from tessellm.files import write_text

from .claims import shown
from .registry import EXPERIMENTS

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 66rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a; }
table { border-collapse: collapse; width: 100%; margin: 1rem 0; }
th, td { text-align: left; vertical-align: top; padding: .4rem .6rem; border-bottom: 1px solid #ddd; }
td.value { font-variant-numeric: tabular-nums; max-width: 16rem; } td.mark, td.target { white-space: nowrap; }
.holds { color: #07704a; } .fails { color: #b3181f; font-weight: 600; } .open { color: #666; }
figure { margin: 1rem 0; } img { max-width: 100%; background: white; }
footer, .paper { color: #666; font-size: .85rem; }
@media (prefers-color-scheme: dark) { body { background: #161616; color: #e8e8e8; } th, td { border-color: #333; }
.holds { color: #4fd6a0; } .fails { color: #ff7b80; } .open, footer, .paper { color: #a5a5a5; } a { color: #8ab4f8; } }
"""
MARKS = {True: ("holds", "holds"), False: ("fails", "does not hold"), None: ("open", "measured")}
INTRODUCTION = (
    "Every row is a claim with what was measured and the target that was set beforehand. A row that says "
    "<i>measured</i> has no target. Numbers and pictures on this page were made by one run; the same command makes "
    "them again."
)


def write_page(names: Sequence[str], out: Path) -> Path:
    """Gather the results in `out` into out/index.html."""
    results = [json.loads((out / f"{name}.json").read_text(encoding="utf-8")) for name in names]
    claims = [claim for result in results for claim in result["claims"]]
    held, missed = (sum(claim["holds"] is mark for claim in claims) for mark in (True, False))
    summary = (
        f"<p><b>{held} hold, {missed} do not</b>, {len(claims) - held - missed} are measured without a target.</p>"
    )
    contents = "".join(f"<tr>{_contents_row(result)}</tr>" for result in results)
    text = (
        f"<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>tessellm: every claim</title><style>{STYLE}</style>"
        f"<h1>Every claim, its value and its target</h1><p>{INTRODUCTION}</p>{summary}"
        f"<table><tr><th>experiment<th>of the paper<th>claims that hold</tr>{contents}</table>"
        f"{''.join(_section(result, out) for result in results)}</html>\n"
    )
    write_text(out / "index.html", text)
    return out / "index.html"


def _contents_row(result: dict[str, Any]) -> str:
    marks = [claim["holds"] for claim in result["claims"] if claim["holds"] is not None]
    style, name = MARKS[all(marks)][0], escape(result["name"])
    paper = escape(EXPERIMENTS[result["name"]].paper) or "(ours)"
    return f"<td><a href='#{name}'>{name}</a><td>{paper}<td class={style}>{sum(marks)} of {len(marks)}"


def _section(result: dict[str, Any], out: Path) -> str:
    experiment, name = EXPERIMENTS[result["name"]], escape(result["name"])
    rows = "\n".join(_row(claim, name) for claim in result["claims"])
    figures = "\n".join(_figure(out / figure, name) for figure in result["figures"])
    command = f"tessellm reproduce {result['name']} --seed {result['seed']} --size {result['size']}"
    made = f"{result['seconds']:.0f} s on {result['hardware']}, torch {result['versions']['torch']}, "
    made += f"commit {str(result['commit'])[:12]}"
    paper = f"<p class=paper>In the paper: {escape(experiment.paper)}</p>" if experiment.paper else ""
    return (
        f"<section id='{name}'><h2>{name}: {escape(experiment.summary)}</h2>{paper}<table><tr><th>claim<th>value"
        f"<th>target<th></tr>{rows}</table>{figures}"
        f"<footer><code>{escape(command)}</code>: {escape(made)}</footer></section>"
    )


def _row(claim: dict[str, Any], experiment: str) -> str:
    style, word = MARKS[claim["holds"]]
    value, name = escape(shown(claim["value"])), escape(f"{experiment}/{claim['id']}")
    return (
        f"<tr id='{name}'><td>{escape(claim['statement'])}<td class=value>{value}"
        f"<td class=target>{escape(claim['target'] or '')}<td class='mark {style}'>{word}</tr>"
    )


def _figure(path: Path, name: str) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f"<figure><img alt='figure of {name}' src='data:image/png;base64,{data}'></figure>"
