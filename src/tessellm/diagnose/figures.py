"""The report's figures, drawn as SVG by hand: no library, no network, colours from the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from ..text.visible import visible
from .interference import Interference, Pair
from .rates import Rate, percent
from .shown import colour

WIDTH = 520
LABEL = 130


def svg(height: float, title: str, parts: Sequence[str], width: float = WIDTH) -> str:
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title>{''.join(parts)}</svg>"
    )


def text(x: float, y: float, content: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(visible(content))}</text>'


def short(name: str, length: int = 17) -> str:
    return name if len(name) <= length else name[: length - 1] + "…"


def rect(x: float, y: float, width: float, height: float, style: str, hover: str = "") -> str:
    title = f"<title>{escape(visible(hover))}</title>" if hover else ""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(0, width):.1f}" height="{height:.1f}" {style}>{title}</rect>'


def owners(owned: dict[str, Rate]) -> str:
    """One bar: whose word the tokens are."""
    parts, x = [], 0.0
    for number, (name, rate) in enumerate(owned.items()):
        width = rate.value * WIDTH
        style = f'fill="{colour(number)}"' if number else 'class="base"'
        parts.append(rect(x, 4, width, 26, style, f"{name}: {rate}"))
        if width > 46:
            parts.append(text(x + width / 2, 22, percent(rate.value), "" if not number else "on", "middle"))
        x += width
    x, y = 0.0, 52
    for number, (name, rate) in enumerate(owned.items()):
        label = f"{short(name)} {percent(rate.value)}"
        if x + 22 + 7 * len(label) > WIDTH:
            x, y = 0.0, y + 20
        style = f'fill="{colour(number)}"' if number else 'class="base"'
        parts += [rect(x, y - 9, 10, 10, style), text(x + 15, y, label)]
        x += 34 + 6.6 * len(label)
    return svg(y + 8, "Whose word the tokens are", parts)


def activity(found: Interference) -> str:
    """How often each expert is active, with its interval, and differs at all."""
    parts, plot = [], WIDTH - LABEL - 20
    at = [LABEL + plot * share for share in (0, 0.25, 0.5, 0.75, 1)]
    height = 24 * len(found.active) + 26
    for x, share in zip(at, (0, 25, 50, 75, 100), strict=True):
        parts += [f'<line x1="{x:.1f}" x2="{x:.1f}" y1="4" y2="{height - 20}" class="grid"/>']
        parts += [text(x, height - 5, f"{share} %", "faint", "middle")]
    for number, (name, rate) in enumerate(found.active.items(), 1):
        y, shade = 24 * number - 8, colour(number)
        low, value, high = (LABEL + plot * each for each in (rate.low, rate.value, rate.high))
        other = found.different[name]
        parts += [
            text(LABEL - 10, y + 4, short(name), "", "end"),
            rect(LABEL, y - 3, plot * other.value, 6, f'fill="{shade}" opacity=".28"', f"{name}, KL > 0.01: {other}"),
            f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{y}" y2="{y}" stroke="{shade}" stroke-width="2"/>',
            f'<circle cx="{value:.1f}" cy="{y}" r="5" fill="{shade}">'
            f"<title>{escape(visible(name))}, KL &gt; 0.1: {rate}</title></circle>",
        ]
    return svg(height, "Share of tokens on which each expert is active", parts)


def matrix(found: Interference) -> str:
    """Experts against experts: how often both are active, and how often they then contradict or repeat each other."""
    names = list(found.active)
    cell = min(64.0, (WIDTH - LABEL) / max(1, len(names)))
    by_pair = {pair.experts: pair for pair in found.pairs}
    parts = []
    for row, name in enumerate(names):
        y = cell * row
        parts.append(text(LABEL - 10, y + cell / 2 + 4, short(name), "", "end"))
        for column, other in enumerate(names):
            x = LABEL + cell * column
            if row == column:
                parts.append(rect(x + 1, y + 1, cell - 2, cell - 2, 'class="hole" rx="4"'))
            else:
                parts += matrix_cell(x, y, cell, by_pair.get((name, other)) or by_pair[other, name])
    y = cell * len(names) + 14
    for column, name in enumerate(names):
        x = LABEL + cell * (column + 0.5)
        if len(names) > 4:
            rotated = text(x, y, short(name, 12), "", "end")
            parts.append(rotated.replace("<text ", f'<text transform="rotate(-40 {x:.1f} {y:.1f})" ', 1))
        else:
            parts.append(text(x, y, short(name, 10), "", "middle"))
    return svg(y + (60 if len(names) > 4 else 6), "How often two experts are active at once", parts)


def matrix_cell(x: float, y: float, cell: float, pair: Pair) -> list[str]:
    bad = pair.contradict.value + pair.repeat.value
    hover = (
        f"{' and '.join(pair.experts)}: both active {pair.overlap}; contradict {pair.contradict}; repeat {pair.repeat}"
    )
    strength = 0.08 + 0.92 * math.sqrt(pair.overlap.value)
    kind = "bad" if bad > 0.01 else "calm"
    parts = [rect(x + 1, y + 1, cell - 2, cell - 2, f'class="{kind}" rx="4" fill-opacity="{strength:.2f}"', hover)]
    if cell >= 40:
        parts.append(
            text(x + cell / 2, y + cell / 2 + (0 if bad > 0.01 else 4), percent(pair.overlap.value), "", "middle")
        )
        if bad > 0.01:
            parts.append(text(x + cell / 2, y + cell / 2 + 15, f"⚡ {percent(bad)}", "small", "middle"))
    return parts


EDGES = (0.01, 0.03, 0.1, 0.3, 1, 3, 10)


def histogram(values: Sequence[float]) -> str:
    """|log Z| of all tokens."""
    counts = [0] * (len(EDGES) + 1)
    for value in values:
        counts[sum(value > edge for edge in EDGES)] += 1
    most, width = max(*counts, 1), (WIDTH - 20) / len(counts)
    names = [f"< {EDGES[0]:g}", *(f"{edge:g}" for edge in EDGES)]
    parts = []
    for number, (count, name) in enumerate(zip(counts, names, strict=True)):
        x, height = 10 + width * number, 110 * count / most
        kind = "bad" if number and EDGES[number - 1] >= 1 else "calm"
        share = percent(count / max(1, len(values)))
        parts.append(rect(x + 3, 130 - height, width - 6, height, f'class="{kind}" rx="2"', f"{share} of the tokens"))
        parts.append(text(x + width / 2, 124 - height, share if count else "", "small", "middle"))
        parts.append(
            text(x + (width / 2 if not number else 3), 146, name, "faint", "middle" if not number else "start")
        )
    parts.append(text(WIDTH - 10, 162, "nats", "faint", "end"))
    return svg(168, "Interference: |log Z| of Eq. 2 over all experts", parts)
