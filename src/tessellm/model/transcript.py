"""Transcript: what was read of each text, where its answers begin, and the prior that a router gives there.

An answer begins where the caller says (`answer_start`), else behind the chat template's marks. Its tokens are evidence
for the posterior; all others are a prompt, at each of whose positions the prior is that of the tokens so far. So no
logit depends on later tokens. A text without marks and without a router is an answer from its first token on.

Shapes: B texts, T positions read, S of them fed last, K experts, C components.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..routing.route import Route, RoutedPrompt, Router
from ..routing.template import ChatMarks
from ..rules import Mixture


class Restarts(NamedTuple):
    """Where the rule's state is made anew, and from which prior."""

    restart_BS: Tensor
    prior_BSC: Tensor

    def part(self, start: int, stop: int) -> Restarts:
        return Restarts(self.restart_BS[:, start:stop], self.prior_BSC[:, start:stop])


@dataclass(frozen=True)
class Routing:
    """What decides about a composition's priors: its rule with the weights, its router, and its template's marks."""

    rule: Mixture
    members: Sequence[str]
    router: Router | None
    marks: ChatMarks

    def routes(self, prompts: Sequence[RoutedPrompt]) -> list[Route]:
        """Return the routes of prompts among the experts that can be selected."""
        experts = [self.members[number] for number in self.rule.candidates(len(self.members) - 1)]
        assert self.router is not None
        return [route.among(experts) for route in self.router.route(prompts)]

    def component_priors(self, prompts: Sequence[RoutedPrompt]) -> Tensor:
        """Return π⁰ of the components for each prompt, [P, C]."""
        rule = self.rule
        rows = [
            rule.active_prior(route.prior, route.active(rule.alone, rule.most), self.members)
            for route in self.routes(prompts)
        ]
        return rule.component_prior(torch.tensor(rows))


class Transcript:
    """Tokens, which of them are real, and the base's energies, [B, T, …]; padding may stand anywhere."""

    def __init__(self, answer_start: int | Tensor | None = None):
        self.answer_start = answer_start  # the column at which the answer begins, of all texts or of each
        self.tokens_BT: Tensor | None = None
        self.mask_BT: Tensor | None = None
        self.energy_BTK: Tensor | None = None

    def read(self, tokens_BS: Tensor, mask_BS: Tensor) -> None:
        """Add tokens that are fed."""
        self.tokens_BT = _joined(self.tokens_BT, tokens_BS.cpu())
        self.mask_BT = _joined(self.mask_BT, mask_BS.cpu())

    def hear(self, energy_BSK: Tensor) -> None:
        """Add the energies of the tokens that were fed last."""
        self.energy_BTK = _joined(self.energy_BTK, energy_BSK)

    def answering(self, routing: Routing) -> Tensor:
        """Return which positions belong to an answer, [B, T]."""
        assert self.tokens_BT is not None
        if self.answer_start is not None:
            start = torch.as_tensor(self.answer_start).cpu().reshape(-1, 1)
            return torch.arange(self.tokens_BT.shape[1])[None].expand_as(self.tokens_BT) >= start
        if not routing.marks.answer:
            return torch.full_like(self.tokens_BT, routing.router is None, dtype=torch.bool)
        found_BT = torch.zeros_like(self.tokens_BT, dtype=torch.bool)
        for row, (ids, place_R) in enumerate(self._real()):
            found_BT[row, place_R] = torch.tensor(in_answers(routing.marks, ids))
        return found_BT

    def restarts(self, routing: Routing, fed: int) -> Restarts:
        """Return where the rule's state is made anew among the last positions fed, and the priors there."""
        assert self.mask_BT is not None
        restart_BS = (~self.answering(routing) & self.mask_BT)[:, -fed:]
        unrouted_C = routing.rule.unrouted_prior(len(routing.members) - 1)
        prior_BSC = unrouted_C.repeat(*restart_BS.shape, 1)
        if routing.router is not None and restart_BS.any():
            prior_BSC[restart_BS] = routing.component_priors(list(self._prompts(routing.marks, restart_BS)))
        return Restarts(restart_BS, prior_BSC)

    def rows_needed(self, routing: Routing, fed: int, keep: int) -> int:
        """Return how many of the last positions fed the rule must see for those that are kept: back to where the state
        was last made anew, or all."""
        assert self.mask_BT is not None
        restart_BS = (~self.answering(routing) & self.mask_BT)[:, -fed:]
        first = fed - keep
        before_BS = restart_BS[:, : first + 1]
        last_B = torch.where(before_BS, torch.arange(first + 1), -1).amax(1)
        begin = int(torch.where(self.mask_BT[:, -fed:].any(1), last_B, first).min())
        return fed - max(0, begin)

    def change_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Reorder, select or repeat texts."""
        for name in ("tokens_BT", "mask_BT", "energy_BTK", "answer_start"):
            value = getattr(self, name)
            if isinstance(value, Tensor) and value.ndim:
                setattr(self, name, change(value))

    def crop(self, removed: int) -> None:
        """Forget the last tokens."""
        for name in ("tokens_BT", "mask_BT", "energy_BTK"):
            value = getattr(self, name)
            if value is not None and removed:
                setattr(self, name, value[:, :-removed])

    def _real(self) -> Iterator[tuple[list[int], Tensor]]:
        """Return per text the real tokens and their columns."""
        assert self.tokens_BT is not None
        assert self.mask_BT is not None
        for token_T, mask_T in zip(self.tokens_BT, self.mask_BT, strict=True):
            (place_R,) = mask_T.nonzero(as_tuple=True)
            yield token_T[place_R].tolist(), place_R

    def _prompts(self, marks: ChatMarks, wanted_BS: Tensor) -> Iterator[RoutedPrompt]:
        """Return a prompt per wanted position: the tokens up to it or, where the marks say that an answer has begun by
        then, up to the answer."""
        assert self.energy_BTK is not None
        fed = wanted_BS.shape[1]
        for (ids, place_R), energy_TK, wanted_S in zip(self._real(), self.energy_BTK, wanted_BS, strict=True):
            offset = len(energy_TK) - fed
            energy_RK = energy_TK[place_R]
            for position, column in enumerate(place_R.tolist()):
                if column >= offset and wanted_S[column - offset]:
                    message = marks.read(ids[: position + 1])
                    end = position + 1 if message.answer is None else message.answer
                    yield RoutedPrompt(ids[:end], message.user, energy_RK[:end])


def in_answers(marks: ChatMarks, ids: Sequence[int]) -> list[bool]:
    """Return per token of a text whether it belongs to an answer, by the tokens up to it."""
    telling, answer = marks.tokens, None
    found = []
    for position, token in enumerate(ids):
        if token in telling:  # no other token ends a mark
            answer = marks.read(ids[: position + 1]).answer
        found.append(answer is not None and answer <= position)
    return found


def _joined(before: Tensor | None, new: Tensor) -> Any:
    return new if before is None else torch.cat([before, new.to(before.device)], 1)
