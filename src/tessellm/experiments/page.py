"""One self-contained HTML page with every claim, its value, its target and its figure."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a; }
table { border-collapse: collapse; width: 100%; margin: 1rem 0; }
th, td { text-align: left; vertical-align: top; padding: .4rem .6rem; border-bottom: 1px solid #ddd; }
td.value { font-variant-numeric: tabular-nums; white-space: nowrap; }
.holds { color: #0a6; } .fails { color: #c22; font-weight: 600; } .open { color: #777; }
figure { margin: 1rem 0; } img { max-width: 100%; } footer { color: #666; font-size: .85rem; }
@media (prefers-color-scheme: dark) { body { background: #161616; color: #e8e8e8; } th, td { border-color: #333; } }
"""
MARKS = {True: ("holds", "holds"), False: ("fails", "does not hold"), None: ("open", "measured")}


def write_page(names: Sequence[str], out: Path) -> Path:
    """Gather the results in `out` into out/index.html."""
    from ..files import write_text

    results = [json.loads((out / f"{name}.json").read_text(encoding="utf-8")) for name in names]
    sections = "\n".join(_section(result, out) for result in results)
    count = sum(claim["holds"] is True for result in results for claim in result["claims"])
    missed = sum(claim["holds"] is False for result in results for claim in result["claims"])
    text = (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>tessellm: every claim</title><style>{STYLE}</style>"
        f"<h1>Every claim, its value and its target</h1><p>{count} hold, {missed} do not.</p>{sections}</html>\n"
    )
    write_text(out / "index.html", text)
    return out / "index.html"


def _section(result: dict[str, Any], out: Path) -> str:
    rows = "\n".join(_row(claim) for claim in result["claims"])
    figures = "\n".join(_figure(out / name, result["name"]) for name in result["figures"])
    made = f"seed {result['seed']}, size {result['size']}, {result['seconds']:.0f} s on {result['hardware']}, "
    made += f"torch {result['versions']['torch']}, commit {str(result['commit'])[:12]}"
    return (
        f"<section id='{escape(result['name'])}'><h2>{escape(result['name'])}</h2>{figures}<table><tr><th>claim"
        f"<th>value<th>target<th></tr>{rows}</table><footer>{escape(made)}</footer></section>"
    )


def _row(claim: dict[str, Any]) -> str:
    style, word = MARKS[claim["holds"]]
    value = f"{claim['value']:.4g}" if isinstance(claim["value"], float) else json.dumps(claim["value"])
    return (
        f"<tr><td>{escape(claim['statement'])}<td class=value>{escape(value)}<td>{escape(claim['target'] or '')}"
        f"<td class={style}>{word}</tr>"
    )


def _figure(path: Path, name: str) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f"<figure><img alt='figure of {escape(name)}' src='data:image/png;base64,{data}'></figure>"
