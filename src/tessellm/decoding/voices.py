"""Requests with a rule of their own, and requests that are observed, among others on the same slots.

All rows of a pass share the members' log-probabilities; only how these combine differs. A Voice says how; an observer
is shown every row from which its request's tokens were chosen. Knows neither texts nor models.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..model.cache import Observer
from ..rules import ComposedRule, Explanation, normalised

if TYPE_CHECKING:
    from .requests import Request


@dataclass(frozen=True, eq=False)
class Voice:
    """A rule over the composition's members, and the tokens that end a text."""

    rule: ComposedRule
    ends: frozenset[int]

    def reads_from(self, prompt: Sequence[int]) -> int:
        """Find the first token of a prompt whose log-probabilities the rule reads."""
        return self.rule.reads_from(prompt, len(prompt) - 1)


@dataclass(frozen=True)
class Observed:
    """Requests of one voice that share an observer, and their rows in the pass."""

    observer: Observer
    voice: Voice
    requests: list[Request] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class SpecialRows:
    """Rows of a pass by voice, and those that are observed; after the pass also what was said and seen: per position
    that tokens were chosen at, in each group that is observed."""

    voices: dict[Voice, list[int]]
    observed: list[Observed]
    why: dict[Voice, Explanation] = field(default_factory=dict)
    seen: list[Mapping[str, Tensor]] = field(default_factory=list)

    def observe(
        self, logits_M: Sequence[Tensor], composed_BV: Tensor, token_B: Tensor, writer_B: Tensor | None = None
    ) -> None:
        """Show every observer the rows of its requests and the tokens that were chosen from them. `writer_B`: the
        member that wrote a token while the others rested, −1: none did; kept as `writer` with what observers return."""
        for group in self.observed:
            at_B, own = torch.tensor(group.rows, device=token_B.device), self.voices[group.voice]
            logp_MB1V = normalised([logits[at_B, -1:] for logits in logits_M])
            places = [own.index(row) for row in group.rows]
            why = self.why[group.voice].map(lambda column, places=places: column[places])  # type: ignore[misc]
            seen = group.observer(logp_MB1V, token_B[at_B, None], composed_BV[at_B, None], why) or {}
            writer = torch.full_like(at_B, -1) if writer_B is None else writer_B[at_B]
            self.seen.append({**seen, "writer": writer})

    def views(self) -> dict[Request, list[dict[str, Any]]]:
        """Copy to the host what observers returned, by request: a view per position."""
        views: dict[Request, list[dict[str, Any]]] = {}
        for group, seen in zip(itertools.cycle(self.observed), self.seen, strict=False):
            lists = {name: values.tolist() for name, values in seen.items()}
            for place, request in enumerate(group.requests):
                views.setdefault(request, []).append({name: values[place] for name, values in lists.items()})
        return views


def sort_rows(requests: Sequence[Request], rows: Sequence[int], own: Voice) -> SpecialRows:
    """Sort a pass's rows by voice, and those that are observed by observer."""
    voices: dict[Voice, list[int]] = {}
    observed: dict[tuple[int, Voice], Observed] = {}
    for request, row in zip(requests, rows, strict=True):
        voice = request.voice or own
        voices.setdefault(voice, []).append(row)
        if request.observer is not None:
            group = observed.setdefault((id(request.observer), voice), Observed(request.observer, voice))
            group.requests.append(request)
            group.rows.append(row)
    return SpecialRows(voices, list(observed.values()))
