"""Texts coloured by owner, as HTML, and what every member would have written at each token, as data for the page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from ..text.visible import visible
from .interference import interfering, rows_of
from .shown import colour, line_style
from .trace import COMPOSED, Trace, finite

MOST_TOKENS = 20_000  # of all texts that are shown
DIGITS = 4


class Page:
    """Collects the tokens of the texts that are shown, each string once."""

    def __init__(self, members: Sequence[str]):
        self.members = tuple(members)
        self.strings: dict[str, int] = {}
        self.rows: list[dict[str, Any]] = []

    def string(self, text: str) -> int:
        return self.strings.setdefault(visible(text, keep="").replace(" ", "␣"), len(self.strings))

    def data(self) -> dict[str, Any]:
        shown = [visible(name) for name in (*self.members, COMPOSED)]
        colours = [colour(number) for number in range(len(self.members))] + ["currentColor"]
        return {"voices": shown, "colours": colours, "strings": list(self.strings), "rows": finite(self.rows)}

    def text(self, trace: Trace, heading: str) -> str:
        """One text; `trace` holds no other."""
        clashing = iter(interfering(rows_of([trace])).tolist())
        scored = trace.scored[0].tolist()
        spans = [
            self._token(trace, position, next(clashing), first=position == scored.index(True))
            if scored[position]
            else f'<span class="p">{in_html(trace.token_text(token))}</span>'
            for position, token in enumerate(trace.tokens[0].tolist())
        ]
        return f'<section class="text"><h3>{heading}</h3><div class="tokens">{"".join(spans)}</div></section>'

    def _token(self, trace: Trace, position: int, clashes: bool, first: bool) -> str:
        at = (0, position)
        owner, token = int(trace.owner[at]), int(trace.tokens[at])
        kinds = "t" + (" x" if clashes else "") + (" v" if trace.novel[at] else "")
        self.rows.append(self._row(trace, at, token, owner))
        number = len(self.rows) - 1
        return (
            f'<span class="{kinds}" data-o="{owner}" data-i="{number}" tabindex="{0 if first else -1}" '
            f'style="{style(owner)}">{in_html(trace.token_text(token))}</span>'
        )

    def _row(self, trace: Trace, at: tuple[int, int], token: int, owner: int) -> dict[str, Any]:
        def numbers(name: str) -> Any:
            return rounded(trace[name][at].tolist())

        row: dict[str, Any] = {"token": self.string(trace.token_text(token)), "owner": owner}
        for name in ("log_z", "clash", "gap", "novel", "logprob", "hazard"):
            row[name] = numbers(name)
        row["kl"] = numbers("divergence")
        row["top"] = [
            [[self.string(trace.token_text(i)), rounded(p)] for i, p in zip(ids, logs, strict=True)]
            for ids, logs in zip(trace.top_ids[at].tolist(), trace.top_logprobs[at].tolist(), strict=True)
        ]
        return row


def style(owner: int) -> str:
    return f"--c:{colour(owner)};border-bottom-style:{line_style(owner)}"


def rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return round(value, DIGITS) if isinstance(value, float) else value


def in_html(text: str) -> str:
    """A token's text, inert; a line break is shown and breaks the line."""
    return escape(visible(text)).replace("\n", "↵\n")


def key(members: Sequence[str]) -> str:
    """Which colour is whose."""
    marks = "".join(
        f'<span><span class="t" data-o="{n}" style="{style(n)}">&nbsp;{escape(visible(name))}&nbsp;</span></span>'
        for n, name in enumerate(members)
    )
    meaning = '<span><span class="t x" data-o="0">&nbsp;interference&nbsp;</span></span>'
    meaning += '<span><span class="t v" data-o="0">&nbsp;nobody’s favourite&nbsp;</span></span>'
    return f'<p class="key">{marks}{meaning}<span>grey: the prompt</span></p>'
