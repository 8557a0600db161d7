"""One self-contained HTML page: what was found and what to do, figures, then every text with its members' views.

Nothing is loaded from anywhere: style, script and data are inside, and the page forbids itself everything else. Texts
and names come from models and files, so they reach the page escaped, or as data that is only ever shown as text.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from ..text.visible import visible
from . import figures
from .coloured import MOST_TOKENS, Page, key
from .interference import rows_of
from .rates import counted, percent
from .trace import Trace

if TYPE_CHECKING:
    from .diagnosis import Diagnosis


def page(title: str, body: str, data: Any) -> str:
    """The finished page."""
    parts = files(__package__)
    script = parts.joinpath("report.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    filling = {
        "title": safe(title),
        "style": parts.joinpath("report.css").read_text(encoding="utf-8"),
        "script": script,
        "script_hash": f"sha256-{digest}",
        "body": body,
        "data": in_script(data),
    }
    template = parts.joinpath("report.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda found: filling[found[1]], template)


def in_script(data: Any) -> str:
    """JSON that cannot end its script element."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def safe(text: str) -> str:
    return escape(visible(text))


def trace_page(trace: Trace) -> str:
    """Traced texts alone."""
    built = Page(trace.members)
    texts = [built.text(trace.text(n), f"<b>Text {n + 1}</b>") for n in range(len(trace)) if trace.scored[n].any()]
    body = f"<header><h1>Who spoke</h1><p>{members_line(trace.members)}; rule {safe(trace.rule)}</p></header>"
    return page("Who spoke", body + f"<h2>Texts</h2>{key(trace.members)}" + "".join(texts), built.data())


def members_line(members: Sequence[str], weights: Sequence[float] = ()) -> str:
    given = dict(zip(members[1:], weights, strict=False))
    experts = [safe(name) + (f" × {given[name]:g}" if given.get(name, 1) != 1 else "") for name in members[1:]]
    return f"{safe(members[0])} with " + ", ".join(experts)


def report_page(diagnosis: Diagnosis) -> str:
    """The whole diagnosis."""
    built = Page(diagnosis.members)
    texts, note = texts_of(diagnosis, built)
    body = "\n".join(
        [
            header(diagnosis),
            f"<h2>What to do</h2>{advice(diagnosis)}",
            f'<h2>What was found</h2><div class="cards">{"".join(cards(diagnosis))}</div>',
            f"<h2>Texts</h2>{key(diagnosis.members)}{note}{''.join(texts)}",
        ]
    )
    return page("Diagnosis of a composition", body, built.data())


def header(diagnosis: Diagnosis) -> str:
    found = diagnosis.found
    title = "These experts compose" if diagnosis.clean else "These experts do not simply compose"
    shown = f"of texts; {interval(diagnosis.predicted)}; composing costs {percent(diagnosis.loss)}"
    tiles = [
        ("predicted right", percent(diagnosis.predicted.value), shown),
        ("interference", percent(found.interfering.value), f"of tokens; {interval(found.interfering)}"),
        ("nobody’s favourite", percent(found.novel.value), f"of tokens; {interval(found.novel)}"),
        ("two experts at once", percent(found.several.value), f"of tokens; {interval(found.several)}"),
    ]
    boxes = "".join(f'<div class="tile"><span>{a}</span><b>{b}</b><small>{c}</small></div>' for a, b, c in tiles)
    line = members_line(diagnosis.members, diagnosis.weights)
    how = f"rule {safe(diagnosis.rule)}"
    count = f"{counted(diagnosis.texts, 'text')}, {counted(diagnosis.tokens, 'token')}"
    return f'<header><h1>{title}</h1><p>{line} · {how} · {count}</p></header><div class="tiles">{boxes}</div>'


def interval(rate: Any) -> str:
    return f"{percent(rate.low)} to {percent(rate.high)}"


def advice(diagnosis: Diagnosis) -> str:
    kinds = {"clean": "fine", "idle": "hint", "few": "hint", "everywhere": "hint"}
    items = [f'<li class="{kinds.get(each.kind, "")}">{safe(each.text)}</li>' for each in diagnosis.advice]
    left_out = [f'<li class="hint">Left out: {safe(each)}</li>' for each in diagnosis.skipped[:10]]
    return f'<ul class="advice">{"".join(items + left_out)}</ul>'


def cards(diagnosis: Diagnosis) -> list[str]:
    found = diagnosis.found
    log_z = rows_of(diagnosis.traces)["log_z"].abs().tolist()
    drawn = [
        card("Whose word the tokens are", figures.owners(found.owned),
             "The member whose law the composed one is nearest to."),
        card("How often an expert is active", figures.activity(found),
             "Dot: KL from the base above 0.1 nats, with a 95 % interval over texts. Bar: above 0.01."),
    ]  # fmt: skip
    if len(found.active) > 1:
        drawn += [
            card("Two experts at once", figures.matrix(found),
                 "Share of tokens on which both are active; ⚡ where they contradict or repeat each other."),
            card("Interference", figures.histogram(log_z), "|log Z| of Eq. 2: zero where the theory holds."),
        ]  # fmt: skip
    return drawn


def card(title: str, figure: str, note: str) -> str:
    return f'<div class="card"><h3>{title}</h3>{figure}<p class="note">{note}</p></div>'


def texts_of(diagnosis: Diagnosis, built: Page) -> tuple[list[str], str]:
    """The texts, in order; if there are too many tokens, those with the most interference."""
    costs = [float(trace.clash[trace.scored].sum()) for trace in diagnosis.traces]
    kept: set[int] = set()
    tokens = 0
    for number in sorted(range(len(costs)), key=lambda n: -costs[n]):
        tokens += int(diagnosis.traces[number].scored.sum())
        if tokens <= MOST_TOKENS or not kept:
            kept.add(number)
    shown = [built.text(diagnosis.traces[number], heading(diagnosis, number)) for number in sorted(kept)]
    left = len(costs) - len(kept)
    return shown, f'<p class="note">{left} texts with less interference are not shown.</p>' if left else ""


def heading(diagnosis: Diagnosis, number: int) -> str:
    trace = diagnosis.traces[number]
    scored = trace.scored
    parts = [
        f"<b>Prompt {number + 1}</b>",
        counted(int(scored.sum()), "token"),
        f"mean |log Z| {float(trace.log_z[scored].abs().mean()):.2f}",
        f"mean gap {float(trace.gap[scored].mean()):.2f}",
    ]
    return "".join(f"<span>{part}</span>" for part in parts)
