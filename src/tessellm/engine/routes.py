"""Routes: which prompts are routed, the base's forward that collects energies, and what follows from a route."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..model import ComposedForCausalLM
from ..routing.route import Route, RoutedPrompt
from .components import Components, ComponentTable
from .members.branches import BranchTokens, branch_logp
from .members.groups import Group
from .requests import Request


class Routes:
    """The router of a composition, for an engine."""

    def __init__(self, model: ComposedForCausalLM):
        self.model, self.table = model, ComponentTable(model)

    @property
    def router(self) -> Any:
        """The composition's router, which may be replaced between prompts."""
        return getattr(self.model, "router", None)

    def needed(self, request: Request) -> bool:
        """Whether the router decides about a prompt: it names no experts, and there are several candidates."""
        return self.router is not None and request.experts is None and self.table.routed and bool(self.table.candidates)

    def unrouted(self, request: Request) -> Components:
        """Return the components of a request that no router decides about."""
        return self.table.unrouted() if request.experts is None else self.table.by_request(request.experts)

    def read(
        self, groups: Sequence[Group], branches: Sequence[BranchTokens], routing: Sequence[bool]
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Run a forward under the router's tap: log-probabilities, and the energies [tokens, experts] of those
        branches of the base that are being routed."""
        home = next(group for group in groups if 0 in group.members)
        tree = home.module if isinstance(home.module, torch.nn.Module) else self.model.base
        home.tapped = True
        try:
            with self.router.tap(tree) as tap:
                logp = branch_logp(groups, branches)
                energy_NK = tap.take()[0]
        finally:
            home.tapped = False
        found: list[Tensor | None] = [None] * len(branches)
        begin = 0  # the base's tokens come first, by slot
        for n in sorted((n for n, b in enumerate(branches) if b.member == 0), key=lambda n: branches[n].slot):
            end = begin + len(branches[n].tokens)
            if routing[n]:
                found[n] = energy_NK[begin:end]
            begin = end
        return logp, found

    def route_whole(self, request: Request) -> Route:
        """Route a prompt by a forward of the base alone."""
        ids_1T = torch.tensor([request.prompt], device=self.model.device)
        with self.router.tap(self.model.base) as tap:
            self.model.member_logits("base", ids_1T, None, 1, {})
            energy_TK = tap.take()[0]
        return self._route([self._prompt(request, energy_TK)])[0]

    def route(self, requests: Sequence[Request]) -> list[Route]:
        """Route prompts that the base has read."""
        prompts = [self._prompt(request, torch.cat(request.branches[0].energies)) for request in requests]
        return self._route(prompts) if prompts else []

    def _route(self, prompts: Sequence[RoutedPrompt]) -> list[Route]:
        names = [self.table.names[number] for number in self.table.candidates]
        return [route.among(names) for route in self.router.route(prompts)]

    def _prompt(self, request: Request, energy_TK: Tensor) -> RoutedPrompt:
        """Return a prompt as the router sees it: up to where the answer begins, even if the client began it."""
        ids, message = request.prompt, self.model.markers.read(request.prompt)
        end = len(ids) if message.answer is None else message.answer
        return RoutedPrompt(ids[:end], message.user, energy_TK[:end])
