"""Requests with a rule of their own, and requests that are watched, among others on the same slots.

All rows of a pass share the members' log-probabilities; only how these combine differs. A Voice says how; a watcher is
shown every row from which its request's tokens were chosen. Knows neither texts nor models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..rules import ComposedRule, Explanation, Rule, normalised

if TYPE_CHECKING:
    from .requests import Request

# (logp_MB1V, composed_B1V, token_B1, why the rule said so) -> [B, …] by name
Watcher = Callable[[Tensor, Tensor, Tensor, Explanation], Mapping[str, Tensor]]


@dataclass(frozen=True, eq=False)
class Voice:
    """A rule over the same members in the place of the composition's own, and the tokens that end a text."""

    rule: ComposedRule
    ends: frozenset[int]


@dataclass
class Special:
    """What some rows of a pass ask for. Requests stand beside the rows that they have in it."""

    voices: dict[Voice | None, list[int]]
    watched: list[tuple[Watcher, Voice | None, list[Request], list[int]]]
    why: dict[Voice | None, Explanation] = field(default_factory=dict)  # of each voice's rows, once the pass is run
    seen: list[Mapping[str, Tensor]] = field(default_factory=list)  # of each watcher, then

    def window(self, own: Rule) -> int:
        """The longest among the rules."""
        return max((voice.rule if voice else own).window for voice in self.voices)

    def watch(self, logits_M: Sequence[Tensor], composed_BV: Tensor, token_B: Tensor) -> None:
        for watcher, voice, _, rows in self.watched:
            at_B = torch.tensor(rows, device=token_B.device)
            logp_MB1V = normalised([logits[at_B, -1:] for logits in logits_M])
            self.seen.append(watcher(logp_MB1V, composed_BV[at_B, None], token_B[at_B, None], self._why(voice, rows)))

    def _why(self, voice: Voice | None, rows: Sequence[int]) -> Explanation:
        """What the voice's rule says of these rows of its own."""
        own = self.voices[voice]
        places = [own.index(row) for row in rows]
        return self.why[voice].map(lambda column: column[places])

    def views(self) -> dict[Request, dict[str, Any]]:
        """What was seen of each request's row, on the host."""
        found: dict[Request, dict[str, Any]] = {}
        for (_, _, requests, _), seen in zip(self.watched, self.seen, strict=True):
            lists = {name: values.tolist() for name, values in seen.items()}
            for number, request in enumerate(requests):
                found[request] = {name: values[number] for name, values in lists.items()}
        return found


def special(requests: Sequence[Request], rows: Sequence[int]) -> Special | None:
    """The wishes of a pass; None where there are none, and the pass may run as it always does."""
    if not any(request.voice or request.watcher for request in requests):
        return None
    voices: dict[Voice | None, list[int]] = {}
    watched: dict[tuple[int, Voice | None], tuple[Watcher, Voice | None, list[Request], list[int]]] = {}
    for request, row in zip(requests, rows, strict=True):
        voices.setdefault(request.voice, []).append(row)
        if request.watcher is not None:
            key = id(request.watcher), request.voice
            _, _, own, at = watched.setdefault(key, (request.watcher, request.voice, [], []))
            own.append(request)
            at.append(row)
    return Special(voices, list(watched.values()))
